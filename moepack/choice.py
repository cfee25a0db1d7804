"""Which backend works here: found out by reading with it, never by the version of a kernel.

Containers forbid io_uring whatever the kernel, file systems refuse O_DIRECT, and tmpfs takes it
without meaning it. So each candidate reads the first block of a real file, and what it got is
compared with a plain read.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moepack.backends import Backend, ReadRequest
from moepack.buffers import allocate
from moepack.errors import MachineError, RequestError
from moepack.files import open_direct
from moepack.threads import ThreadedBackend

if sys.platform == "linux":
    from moepack.uring import UringBackend

NAMES = ("auto", "uring", "direct", "buffered")
_TRIAL_LENGTH = 4096

_HINTS = {
    errno.EPERM: "io_uring is forbidden here (a container's seccomp profile, or the sysctl "
    "kernel.io_uring_disabled): allow it, or ask for `direct`",
    errno.ENOSYS: "this kernel has no io_uring: ask for `direct`",
    errno.ENOMEM: "raise the limit of locked memory (ulimit -l), or ask for `direct`",
    errno.EINVAL: "the file system refuses O_DIRECT: ask for `buffered`, or move the pack",
    errno.EOPNOTSUPP: "ask for `buffered`",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class _NotWorkingError(Exception):
    """A backend does not work here; `code` is the operating system's, 0 where there is none."""

    def __init__(self, problem: str, code: int = 0) -> None:
        super().__init__(problem)
        self.code = code


def choose(
    name: str, paths: Sequence[Path], depth: int, fixed: memoryview | None = None
) -> tuple[Backend, str]:
    """Give the backend `name`, or with `auto` the best that works, and why it is that one.

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
        hint = _HINTS.get(problem.code, "ask for `auto`, which takes what works")
        message = f"the backend {name} does not work here: {problem}"
        raise MachineError(message, path=path, hint=hint) from None


def _first_that_works(
    path: Path | None, depth: int, fixed: memoryview | None
) -> tuple[Backend, str]:
    if path is None:
        return _make("buffered"), "there is no data file to try another on"
    if _takes_anything(path):
        return _make("buffered"), "the file system takes O_DIRECT without meaning it"
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
        raise _NotWorkingError("only Linux has io_uring", errno.ENOSYS)
    return UringBackend(fixed)


def _try(backend: Backend, path: Path | None, depth: int) -> str:
    """Read the start of `path` with `backend`, and say what was found.

    Closes the backend and raises _NotWorkingError where that is not what it should be.
    """
    if path is None:
        return "there is no data file to try it on"
    try:
        return _compare(backend, path, depth)
    except OSError as error:
        backend.close()
        raise _NotWorkingError(error.strerror or str(error), error.errno or 0) from None
    except _NotWorkingError:
        backend.close()
        raise


def _compare(backend: Backend, path: Path, depth: int) -> str:
    buffer = allocate(_TRIAL_LENGTH)
    queue = backend.queue(depth)
    try:
        queue.start([(0, ReadRequest(path, 0, buffer))])
        completion = queue.finished(wait=True)[0]
    finally:
        queue.close()
    if completion.error is not None:
        raise completion.error
    with open(path, "rb", buffering=0) as file:
        expected = file.read(_TRIAL_LENGTH)
    if buffer[: completion.length] != expected:
        raise _NotWorkingError("it reads other bytes than a plain read")
    return f"{backend.name} reads {path.name} right"


def _takes_anything(path: Path) -> bool:
    """Say whether a direct read of one byte is taken, where the kernel does not know of any.

    tmpfs does that: its files lie in memory, and the plainest read is the best one.
    """
    try:
        file = open_direct(path)
    except OSError:
        return False
    try:
        if file.alignment.reported:
            return False
        os.preadv(file.descriptor, [bytearray(1)], 1)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(file.descriptor)
