"""Regular files: nothing else is opened, and a file is recognised when it is looked at again.

A FIFO would wait for somebody at its other end, a device may act when it is opened, and reading it
may never end. Nor is either ever replaced: a file in the place of /dev/null would break a machine.
"""

import contextlib
import errno
import mmap
import os
import stat
from typing import NamedTuple, Self

from moepack.common.paths import AnyPath

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_STREAMS = (stat.S_IFIFO, stat.S_IFCHR)
_UNMAPPABLE = {errno.ENODEV, errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS}
"""The answers of file systems that map no files: 9p's and FUSE's may."""


class NotRegularError(OSError):
    """Something other than a regular file is at a path; `kind` names it, such as `a FIFO`."""

    def __init__(self, kind: str, path: AnyPath) -> None:
        super().__init__(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))
        self.kind = kind


class FileStamp(NamedTuple):
    """The facts of a file that change when it is replaced or written to; times in nanoseconds.

    `ctime_ns` is the one that no program can set back.
    """

    device: int
    inode: int
    length: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> Self:
        """Return the stamp of a file from its `os.stat`."""
        mtime_ns, ctime_ns = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, mtime_ns, ctime_ns)


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Return a descriptor of the file at `path`, or of the one that it links to.

    Fits `open` as its `opener`. Raises NotRegularError at once for anything but a regular file, and
    OSError.
    """
    return _open(path, flags, mode, (stat.S_IFREG,))


def open_addressable(path: AnyPath, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor as `open_regular` does, of a block device as well: it has offsets."""
    return _open(path, flags, 0, (stat.S_IFREG, stat.S_IFBLK))


def is_stream(path: AnyPath) -> bool:
    """Return whether bytes are only written in a row: to a FIFO, a terminal, /dev/null."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode) in _STREAMS
    except OSError:
        return False


def require_replaceable(path: AnyPath) -> None:
    """Raise NotRegularError if something other than a regular file is at `path`, or linked to.

    Nothing, and a link to nothing, can be replaced; /dev/stderr cannot, whatever the shell made of
    it. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_kind(os.stat(path).st_mode, (stat.S_IFREG,), path)
        if os.path.islink(path) and os.readlink(path).startswith("/proc/"):
            raise NotRegularError("a link to an open file", path)


def remove(path: AnyPath) -> None:
    """Remove a regular file or a link, if there is one. Raises NotRegularError, and OSError."""
    with contextlib.suppress(FileNotFoundError):
        _check_kind(os.lstat(path).st_mode, (stat.S_IFREG, stat.S_IFLNK), path)
        os.unlink(path)


def read_back(path: AnyPath, most: int, flags: int = os.O_RDONLY) -> bytes:
    """Return the content of a regular file, at most `most` + 1 bytes: so many are too many.

    The door for all that moepack wrote, and decides by when it reads it again: whatever is in its
    place by now. Raises NotRegularError at once for anything but a regular file, and OSError.
    """
    with open(open_regular(path, flags), "rb") as file:
        return file.read(most + 1)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of an open file. Raises OSError."""
    view = memoryview(data)
    while view:
        length = os.pwrite(descriptor, view, offset)
        view, offset = view[length:], offset + length


def map_file(descriptor: int) -> mmap.mmap | None:
    """Map a whole file that is not empty, read-only; None if its file system maps no files.

    Raises OSError if the machine lacks memory for it.
    """
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno in _UNMAPPABLE:
            return None
        raise


def _open(path: AnyPath, flags: int, mode: int, kinds: tuple[int, ...]) -> int:
    try:  # before it is opened, since some devices act then
        _check_kind(os.stat(path).st_mode, kinds, path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _check_kind(os.fstat(descriptor).st_mode, kinds, path)
        os.set_blocking(descriptor, True)  # else a ring's reads end with EAGAIN
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(mode: int, kinds: tuple[int, ...], path: AnyPath) -> None:
    if stat.S_IFMT(mode) not in kinds:
        raise NotRegularError(_KINDS.get(stat.S_IFMT(mode), "no file"), path)
