"""Holes in files: ranges whose blocks went back to the file system, and which read as zeros.

Linux alone: fallocate(2) with FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE; which ranges are holes
is what lseek(2) says with SEEK_HOLE.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from moepack.storage.open_files import file_system_type

_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_PROBE_BLOCKS = 64
_BTRFS = 0x9123683E
_BTRFS_EXTENT_LENGTH = 128 << 20
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)


def punch(descriptor: int, offset: int, length: int) -> None:
    """Give the blocks of a range back; raises OSError. A block that is only touched is zeroed."""
    fallocate = _find_fallocate()
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def hole_in(descriptor: int, start: int, end: int) -> int | None:
    """Return where the first hole between `start` and `end` begins; None where there is none."""
    hole = os.lseek(descriptor, start, os.SEEK_HOLE)
    return hole if hole < min(end, os.fstat(descriptor).st_size) else None


def block_length(path: str | os.PathLike[str]) -> int:
    """Return the unit in which the file system of a file gives blocks back, in bytes."""
    return max(os.stat(path).st_blksize, os.statvfs(path).f_frsize)


def extent_length(path: str | os.PathLike[str]) -> int:
    """Return how long extents can be that are kept while any byte of them is in use, in bytes.

    128 MiB on btrfs (BTRFS_MAX_EXTENT_SIZE in fs/btrfs/fs.h); 0 where blocks come back one by one.
    """
    return _BTRFS_EXTENT_LENGTH if file_system_type(path) == _BTRFS else 0


def can_punch(folder: Path) -> bool:
    """Try on a scratch file in `folder` whether a hole frees its blocks, and those alone.

    Raises OSError where that cannot be tried: no file can be made there, or the drive fails.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        block = max(os.fstat(descriptor).st_blksize, os.fstatvfs(descriptor).f_frsize)
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
        edges_stay = (
            os.pread(descriptor, block, 0) + os.pread(descriptor, block, start + length)
            == data[:block] + data[-block:]
        )
        return freed >= length // 2 and edges_stay and hole_in(descriptor, 0, len(data)) == start


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Find the system call in the C library; None on systems other than Linux."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function
