"""Who else has a file: blocks that are shared with clones and snapshots, and other programs.

Linux alone. Blocks: the ioctl FS_IOC_FIEMAP (Documentation/filesystems/fiemap.rst), whose extents
are flagged where another file or a snapshot has them too. Programs: a write lease (fcntl(2),
F_SETLEASE) is given only to the one that has the file open; maps count as well.
"""

import contextlib
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

_FIEMAP = 0xC020660B
_FIEMAP_HEADER = struct.Struct("<QQIIII")
_FIEMAP_EXTENT = struct.Struct("<QQQQQIIII")
_EXTENTS_AT_A_TIME = 512
_LAST = 0x1
_SHARED = 0x2000
_SYNC_FIRST = 0x1


def shares_blocks(descriptor: int) -> bool | None:
    """Say whether another file or a snapshot has blocks of an open file; None where unknown."""
    start = 0
    while True:
        header = _FIEMAP_HEADER.pack(
            start, (1 << 64) - 1 - start, _SYNC_FIRST, 0, _EXTENTS_AT_A_TIME, 0
        )
        asked = bytearray(header + bytes(_FIEMAP_EXTENT.size * _EXTENTS_AT_A_TIME))
        try:
            fcntl.ioctl(descriptor, _FIEMAP, asked)
        except OSError:
            return None
        count = _FIEMAP_HEADER.unpack_from(asked)[3]
        for number in range(count):
            at = _FIEMAP_HEADER.size + number * _FIEMAP_EXTENT.size
            logical, _, length, _, _, flags, *_ = _FIEMAP_EXTENT.unpack_from(asked, at)
            if flags & _SHARED:
                return True
            start = logical + length
            if flags & _LAST:
                return False
        if not count:
            return False


def is_open_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Say whether any other program, or this one, has a file open or mapped.

    Where the system gives no leases, what `holders` finds decides. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Whoever opens the file while the lease is held makes the system send a signal. SIGIO, the
        # default, would end this process; SIGURG is ignored where nobody waits for it.
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


def holders(path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the processes that are seen to have a file open or mapped: `llama-server (4711)`."""
    wanted = os.stat(path)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _has(process, wanted, os.path.realpath(path)):
                name = (process / "comm").read_text(errors="replace").strip()
                yield f"{name} ({process.name})"


def _has(process: Path, wanted: os.stat_result, path: str) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            held = descriptor.stat()
            if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    # As the kernel writes names (proc_pid_maps(5)), which need not be UTF-8.
    name = os.fsencode(path).replace(b"\n", rb"\012")
    return b" %s\n" % name in (process / "maps").read_bytes()
