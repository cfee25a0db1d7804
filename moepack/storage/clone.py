"""Share a range of one file with another instead of copying it, where the file system can.

Linux's FICLONERANGE (ioctl_ficlonerange(2)): xfs and btrfs; offsets and lengths are multiples of
the file system's block, which is 4 KiB on nearly all.
"""

import errno
import os
import struct
import tempfile

BLOCK = 4096
_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("<qQQQ")
_REFUSALS = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ETXTBSY)


def clone_range(source: int, source_offset: int, length: int, target: int, offset: int) -> bool:
    """Clone `length` bytes between two open files; say whether the file system did.

    Raises OSError for what is no refusal, such as a full file system.
    """
    try:
        from fcntl import ioctl
    except ImportError:
        return False
    try:
        ioctl(target, _FICLONERANGE, _RANGE.pack(source, source_offset, length, offset))
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    return True


def can_clone(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Say whether a file can share its blocks with new ones in `folder`, by sharing one."""
    try:
        with open(source, "rb") as file, tempfile.TemporaryFile(dir=folder) as new:
            return clone_range(file.fileno(), 0, BLOCK, new.fileno(), 0)
    except OSError:
        return False
