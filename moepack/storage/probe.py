"""The choice of a backend that works here, by reading with it.

File systems refuse O_DIRECT, some of them only when a file is read. So the first block of a real
file is read, and compared with a plain read.
"""

import errno
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import RemotePath
from moepack.storage.backend import Backend, ReadRequest
from moepack.storage.buffers import allocate
from moepack.storage.open_files import lies_in_memory
from moepack.storage.regular_file import read_back
from moepack.storage.threaded import RemoteBackend, ThreadedBackend

NAMES = ("auto", "direct", "buffered", "remote")
_TRIAL_LENGTH = 4096
_AUTO_HINT = "ask for `auto`, which takes what works"
_HINTS = {
    errno.EINVAL: "the file system refuses O_DIRECT: ask for `buffered`, or move the pack",
    errno.EOPNOTSUPP: "ask for `buffered`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def choose(name: str, paths: Iterable[Path]) -> tuple[Backend, str]:
    """Return the backend `name`, or with `auto` the best that works, and the reason.

    `paths` are the files that it will read; the first that exists is tried. Raises RequestError for
    an unknown name, MachineError if a backend that was asked for does not work.
    """
    if name not in NAMES:
        raise RequestError("no such backend", expected=", ".join(NAMES), found=repr(name))
    path = next((path for path in paths if isinstance(path, RemotePath) or path.exists()), None)
    if isinstance(path, RemotePath):
        if name not in ("auto", "remote"):
            hint = "leave the choice to `auto`"
            raise MachineError(f"{name} reads files of this machine", path=path, hint=hint)
        return RemoteBackend(), "the files are in a store"
    return _choose_auto(path) if name == "auto" else _choose_named(name, path)


def _choose_named(name: str, path: Path | None) -> tuple[Backend, str]:
    is_direct = name == "direct"
    if path is None:
        return ThreadedBackend(direct=is_direct), "asked for; there is no data file to try it on"
    error = _try(path, is_direct=is_direct)
    if error is not None:
        problem = f"the backend {name} does not work here: {error.strerror}"
        raise MachineError(problem, path=path, hint=_HINTS.get(error.errno or 0, _AUTO_HINT))
    return ThreadedBackend(direct=is_direct), f"asked for; {name} reads {path.name}"


def _choose_auto(path: Path | None) -> tuple[Backend, str]:
    if path is None:
        why = "there is no data file to try another on"
    elif lies_in_memory(path):
        why = "the files lie in memory"
    elif (error := _try(path, is_direct=True)) is None:
        return ThreadedBackend(direct=True, falls_back=True), f"direct reads {path.name}"
    else:
        why = f"direct does not work here ({error.strerror})"
    return ThreadedBackend(direct=False), why


def problem_with_direct_reads(path: Path) -> str | None:
    """Return the reason why direct reads of a file fail; None if they work."""
    error = _try(path, is_direct=True)
    return None if error is None else str(error.strerror)


def _try(path: Path, *, is_direct: bool) -> OSError | None:
    """Read the start of `path`; return the error, or one for other bytes than a plain read's."""
    buffer = allocate(_TRIAL_LENGTH)
    with closing(ThreadedBackend(direct=is_direct)) as backend:
        _, length, problem = backend.read(ReadRequest(path, 0, buffer))
    try:
        is_right = buffer[:length] == read_back(path, _TRIAL_LENGTH)[:_TRIAL_LENGTH]
    except OSError as error:
        return problem or error
    return problem or (None if is_right else OSError(0, "it reads other bytes than a plain read"))
