"""A disk that loses power: file systems in an image, and what of them had reached it at a moment.

The image is that of a loop device. What a file system has handed to the device is in it, and what
it still holds in memory is not: a copy, taken without a sync, is what a loss of power leaves.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine_faults import Room

LENGTHS = {"ext4": 24 << 20, "xfs": 320 << 20}
_MAKERS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}


class LoopDisk:
    """A new file system of `kind` on an image in `folder`, mounted in `room`.

    `path` is where it is seen. Skips the test where there is no such file system or no loop device.
    """

    def __init__(self, kind: str, folder: Path, room: Room) -> None:
        if shutil.which(_MAKERS[kind][0]) is None:
            pytest.skip(f"{_MAKERS[kind][0]} is not installed")
        self.image = folder / "image"
        self._room = room
        self._place = folder / "disk"
        self._place.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(LENGTHS[kind])
        subprocess.run([*_MAKERS[kind], self.image], check=True)
        self.path = room.mount(self._place, "-t", kind, "-o", "loop", self.image)

    def unmount(self) -> None:
        """Take the file system out."""
        assert self._room.run("umount", self._place), "still in use"

    def mount(self, image: Path) -> None:
        """Put the disk in that `image` is of; the file system finds what was left, and mends it."""
        assert self._room.run("mount", "-o", "loop", image, self._place), "cannot be mounted"

    def snapshot(self, target: Path) -> str:
        """Copy what has reached the disk by now; return a digest of it."""
        return copy_sparse(self.image, target)


def copy_sparse(path: Path, target: Path) -> str:
    """Copy a file into a new one, zeros as holes; return a digest of it."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as source, open(target, "xb", buffering=0) as copy:
        os.truncate(target, os.fstat(source.fileno()).st_size)
        for start, end in _data(source.fileno()):
            for offset in range(start, end, 64 << 10):
                data = os.pread(source.fileno(), min(64 << 10, end - offset), offset)
                if data.count(0) != len(data):
                    digest.update(b"%d" % offset + data)
                    os.pwrite(copy.fileno(), data, offset)
    return digest.hexdigest()


def _data(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield where a file has data, from its start to its end."""
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end
