"""The choice of a backend that works here, by reading with it, never by the version of a kernel.

Containers forbid io_uring whatever the kernel, and file systems refuse O_DIRECT. So each candidate
reads the first block of a real file, which is compared with a plain read.
"""

import errno
import sys
from collections.abc import Iterable
from pathlib import Path

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import RemotePath
from moepack.storage.backend import Backend, ReadRequest
from moepack.storage.buffers import allocate
from moepack.storage.open_files import lies_in_memory
from moepack.storage.regular_file import open_regular
from moepack.storage.routed_backend import FallbackBackend
from moepack.storage.threaded import RemoteBackend, ThreadedBackend

if sys.platform == "linux":
    from moepack.storage.io_uring import UringBackend

NAMES = ("auto", "uring", "direct", "buffered", "remote")
_TRIAL_LENGTH = 4096

_MANY_FILES_HINT = "raise the limit of open files (ulimit -n)"
_QUEUE_REMEDIES = {
    errno.EPERM: "io_uring is forbidden here (a container's seccomp profile, or the sysctl "
    "kernel.io_uring_disabled): allow it",
    errno.ENOSYS: "boot a kernel with io_uring",
    errno.ENOMEM: "raise the limit of locked memory (ulimit -l)",
    errno.EMFILE: _MANY_FILES_HINT,
}
_READ_HINTS = {
    errno.EINVAL: "the file system refuses O_DIRECT: ask for `buffered`, or move the pack",
    errno.EOPNOTSUPP: "ask for `buffered`",
    errno.EMFILE: _MANY_FILES_HINT,
}


class _NotWorkingError(Exception):
    """A backend does not work here; `hint` is the next step, `remedy` would make it work."""

    def __init__(self, problem: str, hint: str | None = None, remedy: str | None = None) -> None:
        super().__init__(problem)
        self.hint = hint or "ask for `auto`, which takes what works"
        self.remedy = remedy


def choose(
    name: str, paths: Iterable[Path], depth: int, fixed: memoryview | None = None
) -> tuple[Backend, str]:
    """Return the backend `name`, or with `auto` the best that works, and the reason.

    `paths` are the files that it will read; the first that exists is tried, with a queue of
    `depth`. `fixed` is memory to register, if the backend can. Raises RequestError for an unknown
    name, MachineError if a backend that was asked for does not work.
    """
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise RequestError("no such backend", expected=expected, found=repr(name))
    path = next((path for path in paths if isinstance(path, RemotePath) or path.exists()), None)
    if isinstance(path, RemotePath):
        if name not in ("auto", "remote"):
            hint = "leave the choice to `auto`"
            raise MachineError(f"{name} reads files of this machine", path=path, hint=hint)
        return RemoteBackend(), "the files are in a store"
    if name != "auto":
        try:
            backend, outcome = _try(name, path, depth, fixed)
        except _NotWorkingError as problem:
            message = f"the backend {name} does not work here: {problem}"
            raise MachineError(message, path=path, hint=problem.hint) from None
        return backend, f"asked for; {outcome}"
    if path is None:
        return ThreadedBackend(direct=False), "there is no data file to try another on"
    if lies_in_memory(path):
        return ThreadedBackend(direct=False), "the files lie in memory"
    reasons: list[str] = []
    for candidate in ("uring", "direct"):
        try:
            backend, outcome = _try(candidate, path, depth, fixed)
            return FallbackBackend(backend), "; ".join([*reasons, outcome])
        except _NotWorkingError as problem:
            reasons.append(f"{candidate} does not work here ({problem})")
    return ThreadedBackend(direct=False), "; ".join(reasons)


def problem_with(name: str, path: Path, depth: int) -> tuple[str, str | None] | None:
    """Return the reason why a backend fails on a file, and a remedy; None if it works."""
    try:
        backend, _ = _try(name, path, depth, None)
    except _NotWorkingError as problem:
        return str(problem), problem.remedy
    backend.close()
    return None


def _try(name: str, path: Path | None, depth: int, fixed: memoryview | None) -> tuple[Backend, str]:
    """Return a backend that has read the start of `path`, and the outcome in words."""
    if name != "uring":
        backend: Backend = ThreadedBackend(direct=name == "direct")
    elif sys.platform == "linux":
        backend = UringBackend(fixed)
    else:
        raise _NotWorkingError("only Linux has io_uring", "ask for `direct`")
    if path is None:
        return backend, "there is no data file to try it on"
    try:
        start = _read_start(backend, path, depth)
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            if start != file.read(_TRIAL_LENGTH):
                raise _NotWorkingError("it reads other bytes than a plain read")
    except BaseException as error:
        backend.close()
        if isinstance(error, OSError):
            hint = _READ_HINTS.get(error.errno or 0)
            raise _NotWorkingError(error.strerror or str(error), hint) from None
        raise
    return backend, f"{name} reads {path.name} right"


def _read_start(backend: Backend, path: Path, depth: int) -> memoryview:
    try:
        queue = backend.queue(depth)
    except OSError as error:
        remedy = _QUEUE_REMEDIES.get(error.errno or 0)
        hint = remedy  # threads need descriptors too
        if remedy is not None and error.errno != errno.EMFILE:
            hint = f"{remedy}, or ask for `direct`"
        raise _NotWorkingError(error.strerror or str(error), hint, remedy) from None
    buffer = allocate(_TRIAL_LENGTH)
    try:
        queue.start([(0, ReadRequest(path, 0, buffer))])
        completion = queue.finished(wait=True)[0]
    finally:
        queue.close()
    if completion.error is not None:
        raise completion.error
    return buffer[: completion.length]
