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
from moepack.storage.regular_file import open_regular
from moepack.storage.threaded import RemoteBackend, ThreadedBackend

NAMES = ("auto", "direct", "buffered", "remote")
_TRIAL_LENGTH = 4096
_AUTO_HINT = "ask for `auto`, which takes what works"
_HINTS = {
    errno.EINVAL: "the file system refuses O_DIRECT: ask for `buffered`, or move the pack",
    errno.EOPNOTSUPP: "ask for `buffered`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class _NotWorkingError(Exception):
    """A backend does not work here; `hint` is the next step."""

    def __init__(self, problem: str, hint: str = _AUTO_HINT) -> None:
        super().__init__(problem)
        self.hint = hint


def choose(name: str, paths: Iterable[Path]) -> tuple[Backend, str]:
    """Return the backend `name`, or with `auto` the best that works, and the reason.

    `paths` are the files that it will read; the first that exists is tried. Raises RequestError for
    an unknown name, MachineError if a backend that was asked for does not work.
    """
    if name not in NAMES:
        hint = "`direct` is as fast; `moepack.ExpertCache` has it" if name == "uring" else None
        expected = ", ".join(NAMES)
        raise RequestError("no such backend", expected=expected, found=repr(name), hint=hint)
    path = next((path for path in paths if isinstance(path, RemotePath) or path.exists()), None)
    if isinstance(path, RemotePath):
        if name not in ("auto", "remote"):
            hint = "leave the choice to `auto`"
            raise MachineError(f"{name} reads files of this machine", path=path, hint=hint)
        return RemoteBackend(), "the files are in a store"
    return _choose_auto(path) if name == "auto" else _choose_named(name, path)


def _choose_named(name: str, path: Path | None) -> tuple[Backend, str]:
    if path is None:
        outcome = "there is no data file to try it on"
    else:
        try:
            outcome = _try(name, path)
        except _NotWorkingError as problem:
            message = f"the backend {name} does not work here: {problem}"
            raise MachineError(message, path=path, hint=problem.hint) from None
    return ThreadedBackend(direct=name == "direct"), f"asked for; {outcome}"


def _choose_auto(path: Path | None) -> tuple[Backend, str]:
    if path is None:
        why = "there is no data file to try another on"
    elif lies_in_memory(path):
        why = "the files lie in memory"
    else:
        try:
            why = _try("direct", path)
            return ThreadedBackend(direct=True, falls_back=True), why
        except _NotWorkingError as problem:
            why = f"direct does not work here ({problem})"
    return ThreadedBackend(direct=False), why


def problem_with_direct_reads(path: Path) -> str | None:
    """Return the reason why direct reads of a file fail; None if they work."""
    try:
        _try("direct", path)
    except _NotWorkingError as problem:
        return str(problem)
    return None


def _try(name: str, path: Path) -> str:
    """Read the start of `path`, and return the outcome in words."""
    buffer = allocate(_TRIAL_LENGTH)
    try:
        with closing(ThreadedBackend(direct=name == "direct")) as backend:
            completion = backend.read(ReadRequest(path, 0, buffer))
        if completion.error is not None:
            raise completion.error
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            if buffer[: completion.length] != file.read(_TRIAL_LENGTH):
                raise _NotWorkingError("it reads other bytes than a plain read")
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, _AUTO_HINT)
        raise _NotWorkingError(error.strerror or str(error), hint) from None
    return f"{name} reads {path.name} right"
