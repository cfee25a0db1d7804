"""Real file systems on loop devices, and what of their files is shared. Needs root."""

import contextlib
import fcntl
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine_faults import Room

_FIEMAP = 0xC020660B
_HEADER = struct.Struct("<QQIIII")
_EXTENT = struct.Struct("<QQQ16xI12x")
_SYNC = 1
_LAST, _SHARED = 0x1, 0x2000
_COUNT = 4096


@contextlib.contextmanager
def mounted(
    kind: str, folder: Path, length: int = 400 << 20, *, options: str = "loop"
) -> Iterator[Path]:
    """Mount a new file system of `kind` and give its path; skip where that cannot be done."""
    folder.mkdir()
    with Room() as room:
        if kind in ("tmpfs", "ramfs"):
            yield room.mount(folder, "-t", kind, "-o", f"size={length}", "none")
            return
        make = shutil.which(f"mkfs.{kind}")
        if make is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        image = folder.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(length)
        subprocess.run([make, "-q", image], check=True, capture_output=True)
        yield room.mount(folder, "-t", kind, "-o", options, image)
        room.run("umount", folder)


def shared_length(path: Path) -> int:
    """Return how many bytes of a file other files have too, as the file system says."""
    buffer = bytearray(_HEADER.size + _COUNT * _EXTENT.size)
    _HEADER.pack_into(buffer, 0, 0, (1 << 64) - 1, _SYNC, 0, _COUNT, 0)
    with open(path, "rb") as file:
        fcntl.ioctl(file, _FIEMAP, buffer)
    count = _HEADER.unpack_from(buffer)[3]
    extents = [_EXTENT.unpack_from(buffer, _HEADER.size + n * _EXTENT.size) for n in range(count)]
    assert not extents or extents[-1][3] & _LAST, "more extents than there is room for"
    return sum(length for _, _, length, flags in extents if flags & _SHARED)
