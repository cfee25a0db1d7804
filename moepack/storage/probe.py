"""Which backend works here: found out by reading with it, never by the version of a kernel.

Containers forbid io_uring whatever the kernel, and file systems refuse O_DIRECT. So each candidate
reads the first block of a real file, and what it got is compared with a plain read.
"""

import errno
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from moepack.errors import MachineError, RequestError
from moepack.storage.backend import Backend, ReadRequest
from moepack.storage.buffers import allocate
from moepack.storage.open_files import lies_in_memory
from moepack.storage.threaded import ThreadedBackend

if sys.platform == "linux":
    from moepack.storage.io_uring import UringBackend

NAMES = ("auto", "uring", "direct", "buffered")
_TRIAL_LENGTH = 4096

_QUEUE_HINTS = {
    errno.EPERM: "io_uring is forbidden here (a container's seccomp profile, or the sysctl "
    "kernel.io_uring_disabled): allow it, or ask for `direct`",
    errno.ENOSYS: "this kernel has no io_uring: ask for `direct`",
    errno.ENOMEM: "raise the limit of locked memory (ulimit -l), or ask for `direct`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
_READ_HINTS = {
    errno.EINVAL: "the file system refuses O_DIRECT: ask for `buffered`, or move the pack",
    errno.EOPNOTSUPP: "ask for `buffered`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class _NotWorkingError(Exception):
    """A backend does not work here; `hint` says what to do."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.hint = hint or "ask for `auto`, which takes what works"


def choose(
    name: str, paths: Iterable[Path], depth: int, fixed: memoryview | None = None
) -> tuple[Backend, str]:
    """Return the backend `name`, or with `auto` the best that works, and why it is that one.

    `paths` are the files that it will read; the first that exists is tried, with a queue of
    `depth`. `fixed` is memory to register, where the backend can. Raises RequestError for a name
    that is none, MachineError where a backend that was asked for does not work.
    """
    if name not in NAMES:
        expected = ", ".join(NAMES)
        raise RequestError("no such backend", expected=expected, found=repr(name))
    path = next((path for path in paths if path.exists()), None)
    if name == "auto":
        return _first_that_works(path, depth, fixed)
    try:
        backend = _make(name, fixed)
        return backend, f"asked for; {_try(backend, path, depth)}"
    except _NotWorkingError as problem:
        message = f"the backend {name} does not work here: {problem}"
        raise MachineError(message, path=path, hint=problem.hint) from None


def _first_that_works(
    path: Path | None, depth: int, fixed: memoryview | None
) -> tuple[Backend, str]:
    if path is None:
        return _make("buffered"), "there is no data file to try another on"
    if lies_in_memory(path):
        return _make("buffered"), "the files lie in memory"
    reasons = []
    for name in ("uring", "direct"):
        try:
            backend = _make(name, fixed)
            reasons.append(_try(backend, path, depth))
            return backend, "; ".join(reasons)
        except _NotWorkingError as problem:
            reasons.append(f"{name} does not work here ({problem})")
    return _make("buffered"), "; ".join(reasons)


def _make(name: str, fixed: memoryview | None = None) -> Backend:
    if name != "uring":
        return ThreadedBackend(direct=name == "direct")
    if sys.platform != "linux":
        raise _NotWorkingError("only Linux has io_uring", _QUEUE_HINTS[errno.ENOSYS])
    return UringBackend(fixed)


def _try(backend: Backend, path: Path | None, depth: int) -> str:
    """Read the start of `path` with `backend`, and say what was found.

    Closes the backend and raises _NotWorkingError where that is not what it should be.
    """
    if path is None:
        return "there is no data file to try it on"
    try:
        start = _read_start(backend, path, depth)
        with open(path, "rb", buffering=0) as file:
            if start != file.read(_TRIAL_LENGTH):
                raise _NotWorkingError("it reads other bytes than a plain read")
    except OSError as error:
        backend.close()
        raise _not_working(error, _READ_HINTS) from None
    except BaseException:
        backend.close()
        raise
    return f"{backend.name} reads {path.name} right"


def _read_start(backend: Backend, path: Path, depth: int) -> memoryview:
    try:
        queue = backend.queue(depth)
    except OSError as error:
        raise _not_working(error, _QUEUE_HINTS) from None
    buffer = allocate(_TRIAL_LENGTH)
    try:
        queue.start([(0, ReadRequest(path, 0, buffer))])
        completion = queue.finished(wait=True)[0]
    finally:
        queue.close()
    if completion.error is not None:
        raise completion.error
    return buffer[: completion.length]


def _not_working(error: OSError, hints: Mapping[int, str]) -> _NotWorkingError:
    return _NotWorkingError(error.strerror or str(error), hints.get(error.errno or 0))
