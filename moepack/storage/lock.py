"""A file that one process at a time writes, or removes: locked as long as it is open."""

import errno
import fcntl
import os

from moepack.errors import RequestError

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def lock(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Lock the open file at `path` until it is closed; where there are no locks it goes without.

    Raises RequestError where another process has it locked, or has just moved or removed it, and
    OSError.
    """
    is_held = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        if not is_held and error.errno not in _NO_LOCKS:
            raise
    if is_held or not _is_at(path, descriptor):
        hint = "wait until it is done, or choose another place"
        raise RequestError("another moepack is writing here", path=path, hint=hint)


def _is_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
