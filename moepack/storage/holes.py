"""Holes in files: ranges that read as zeros, since their blocks went back to the file system.

Linux alone: fallocate(2) with FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE makes them, lseek(2)
with SEEK_HOLE finds them.
"""

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from moepack.common.paths import AnyPath
from moepack.storage import libc
from moepack.storage.open_files import file_system_type

_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_PROBE_BLOCKS = 64
_BTRFS = 0x9123683E
_BTRFS_EXTENT_LENGTH = 128 << 20
_FALLOCATE_TYPES = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate = libc.function("fallocate", *_FALLOCATE_TYPES)
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)


def punch(descriptor: int, offset: int, length: int) -> None:
    """Give the blocks of a range back; raises OSError. A block that is only touched is zeroed."""
    if _fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        error = libc.last_error()
        if error.errno != errno.EINTR:
            raise error


def hole_in(descriptor: int, start: int, end: int) -> int | None:
    """Return the offset of the first hole between `start` and `end`; None if there is none."""
    hole = os.lseek(descriptor, start, os.SEEK_HOLE)
    return hole if hole < min(end, os.fstat(descriptor).st_size) else None


def block_length(path: AnyPath | int) -> int:
    """Return the bytes of a block of a file's file system, by its path or descriptor."""
    return max(os.stat(path).st_blksize, os.statvfs(path).f_frsize)


def extent_length(path: AnyPath) -> int:
    """Return the greatest length in bytes that a file system frees only as a whole.

    128 MiB on btrfs (BTRFS_MAX_EXTENT_SIZE in fs/btrfs/fs.h); 0 if blocks come back one by one.
    """
    return _BTRFS_EXTENT_LENGTH if file_system_type(path) == _BTRFS else 0


def can_punch(folder: Path) -> bool:
    """Return whether a hole in a scratch file in `folder` frees its blocks, and those alone.

    Raises OSError if that cannot be tried: no file can be made there, or the drive fails.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        block = block_length(descriptor)
        data = os.urandom(block) * _PROBE_BLOCKS
        file.write(data)
        file.flush()
        os.fsync(descriptor)
        before = os.fstat(descriptor).st_blocks
        start, length = block, block * (_PROBE_BLOCKS - 2)
        try:
            punch(descriptor, start, length)
        except OSError as error:
            if error.errno not in _NO_HOLES:
                raise
            return False
        os.fsync(descriptor)
        freed = 512 * (before - os.fstat(descriptor).st_blocks)
        edges = os.pread(descriptor, block, 0) + os.pread(descriptor, block, start + length)
        edges_stay = edges == data[:block] + data[-block:]
        return freed >= length // 2 and edges_stay and hole_in(descriptor, 0, len(data)) == start
