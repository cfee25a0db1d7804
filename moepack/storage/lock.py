"""A file or folder that one process at a time writes, or removes: locked while it is open."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def try_lock(descriptor: int, path: AnyPath, *, is_needed: bool = False) -> bool:
    """Lock the open file at `path` until it is closed.

    Returns false if another process has locked it, or has just moved or removed it. A file system
    without locks goes without, unless the lock `is_needed`. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if is_needed or error.errno not in _NO_LOCKS:
            raise
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock(descriptor: int, path: AnyPath) -> None:
    """Lock as `try_lock` does; raises RequestError if another process has the file, and OSError."""
    if not try_lock(descriptor, path):
        hint = "wait until it is done, or choose another place"
        raise RequestError("another moepack is writing here", path=path, hint=hint)


@contextlib.contextmanager
def locked_folder(folder: AnyPath) -> Iterator[None]:
    """Lock a folder during the block. Raises what `lock` does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, os.path.realpath(folder) if os.path.islink(folder) else folder)
        yield
    finally:
        os.close(descriptor)
