"""Opening a file only where it is one: a FIFO would wait for a writer, a device act by itself."""

import errno
import os
import stat

MACHINE_HINTS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system's table of open files is full",
    errno.ENOMEM: "free memory, or raise the limit of locked memory (ulimit -l)",
}
"""What to do about what the system has run out of, by errno."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """What should be a regular file is something else: `kind` says what, such as `a FIFO`."""

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EINVAL, f"{kind}, not a regular file")
        self.kind = kind


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of the file at `path`, or of the one that it links to.

    Fits `open` as its `opener`. Raises NotRegularError at once for what is no regular file, and
    OSError.
    """
    return _open(path, flags, (stat.S_IFREG,))


def open_addressable(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor as `open_regular` does, of a block device as well: it has offsets."""
    return _open(path, flags, (stat.S_IFREG, stat.S_IFBLK))


def _open(path: str | os.PathLike[str], flags: int, kinds: tuple[int, ...]) -> int:
    _check_kind(os.stat(path).st_mode, kinds)  # first, since some devices act when they are opened
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(os.fstat(descriptor).st_mode, kinds)
        os.set_blocking(descriptor, True)  # else a ring's reads end with EAGAIN
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(mode: int, kinds: tuple[int, ...]) -> None:
    if stat.S_IFMT(mode) not in kinds:
        raise NotRegularError(_KINDS.get(stat.S_IFMT(mode), "no file"))
