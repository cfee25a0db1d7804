"""Regular files: opened without ever waiting, and recognised when they are looked at again."""

import errno
import os
import stat
from typing import NamedTuple, Self


class NotRegularError(OSError):
    """A directory, a pipe or a device has the name of a file."""


class FileStamp(NamedTuple):
    """What changes when a file is replaced or written to; times are in nanoseconds.

    `ctime_ns` is the one that no program can set back.
    """

    device: int
    inode: int
    length: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the stamp of a file from what `os.stat` says of it."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file and return its descriptor.

    Raises NotRegularError for whatever else has that name: opening a pipe would wait for somebody
    at its other end, and reading a device may never end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularError(errno.EINVAL, "not a regular file", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
