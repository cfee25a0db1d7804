"""Blocks of files: holes, blocks that other files have too, and programs that use a file.

Linux alone. Holes read as zeros, since their blocks went back to the file system: fallocate(2) with
FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE makes them, lseek(2) with SEEK_HOLE finds them.
Cloning: the ioctl FICLONERANGE (ioctl_ficlonerange(2)), on xfs and btrfs; offsets and lengths are
multiples of the file system's block, which is 4 KiB on nearly all. Shared blocks: the ioctl
FS_IOC_FIEMAP (Documentation/filesystems/fiemap.rst), whose extents are flagged if another file or a
snapshot has them too. Programs: a write lease (fcntl(2), F_SETLEASE) is given only to the one that
has the file open; maps count as well.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moepack.common.paths import AnyPath
from moepack.storage import libc
from moepack.storage.extents import BLOCK
from moepack.storage.open_files import file_system_type

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PROBE_BLOCKS = 64
_BTRFS = 0x9123683E
_BTRFS_EXTENT_LENGTH = 128 << 20
_FALLOCATE_TYPES = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate = libc.function("fallocate", *_FALLOCATE_TYPES)
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)
_CLONE_RANGE = 0x4020940D
_CLONE = struct.Struct("<qQQQ")
_NO_CLONES = (
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ETXTBSY,
)
_FIEMAP = 0xC020660B
_FIEMAP_HEADER = struct.Struct("<QQIIII")
_FIEMAP_EXTENT = struct.Struct("<QQQQQIIII")
_EXTENTS_AT_A_TIME = 512
_LAST, _SHARED = 0x1, 0x2000
_SYNC_FIRST = 0x1


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


def clone_range(source: int, source_offset: int, length: int, target: int, offset: int) -> bool:
    """Share `length` bytes of one open file with another; return whether the file system did.

    Raises OSError for what is no refusal, such as a full file system.
    """
    try:
        fcntl.ioctl(target, _CLONE_RANGE, _CLONE.pack(source, source_offset, length, offset))
    except OSError as error:
        if error.errno in _NO_CLONES:
            return False
        raise
    return True


def can_clone(source: AnyPath, folder: AnyPath) -> bool:
    """Return whether a file can share its blocks with new ones in `folder`, by sharing one."""
    try:
        with open(source, "rb") as file, tempfile.TemporaryFile(dir=folder) as new:
            return clone_range(file.fileno(), 0, BLOCK, new.fileno(), 0)
    except OSError:
        return False


def shares_blocks(descriptor: int) -> bool | None:
    """Return whether another file or a snapshot has blocks of an open file; None if unknown."""
    start = 0
    while True:
        length = (1 << 64) - 1 - start
        header = _FIEMAP_HEADER.pack(start, length, _SYNC_FIRST, 0, _EXTENTS_AT_A_TIME, 0)
        buffer = bytearray(header + bytes(_FIEMAP_EXTENT.size * _EXTENTS_AT_A_TIME))
        try:
            fcntl.ioctl(descriptor, _FIEMAP, buffer)
        except OSError:
            return None
        count = _FIEMAP_HEADER.unpack_from(buffer)[3]
        for number in range(count):
            at = _FIEMAP_HEADER.size + number * _FIEMAP_EXTENT.size
            logical, _, length, _, _, flags, *_ = _FIEMAP_EXTENT.unpack_from(buffer, at)
            if flags & _SHARED:
                return True
            start = logical + length
            if flags & _LAST:
                return False
        if not count:
            return False


def is_open_elsewhere(path: AnyPath) -> bool:
    """Return whether any program, this one too, has a file open or mapped. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Whoever opens the file while the lease is held makes the system send a signal. SIGIO, the
        # default, would end this process; SIGURG is ignored if nobody waits for it.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
    else:
        return False
    finally:
        os.close(descriptor)
    return any(holders(path))


def holders(path: AnyPath) -> Iterator[str]:
    """Yield the processes that have a file open or mapped, as far as seen: `llama-server (47)`."""
    file = os.stat(path)
    # As the kernel writes names (proc_pid_maps(5)), which need not be UTF-8.
    name = os.fsencode(os.path.realpath(path)).replace(b"\n", rb"\012")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _has_open(process, file) or b" %s\n" % name in (process / "maps").read_bytes():
                program = (process / "comm").read_text(errors="replace").strip()
                yield f"{program} ({process.name})"


def _has_open(process: Path, file: os.stat_result) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False
