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

    With `has_cache` the disk has one of its own that power is lost to: the image lies in a file
    system on another image, to which it is written only when the disk is told to flush. `path` is
    where it is seen. Skips the test where there is no such file system or no loop device.
    """

    def __init__(self, kind: str, folder: Path, room: Room, *, has_cache: bool = False) -> None:
        if shutil.which(_MAKERS[kind][0]) is None:
            pytest.skip(f"{_MAKERS[kind][0]} is not installed")
        self.image = folder / "image"
        self._room = room
        self._place = folder / "disk"
        self._place.mkdir()
        self._cache: Path | None = None
        image = self.image
        if has_cache:
            self._cache = folder / "cache"
            self._cache.mkdir()
            _make_image("ext4", self.image, LENGTHS[kind] + LENGTHS["ext4"])
            image = room.mount(self._cache, "-o", "loop", self.image) / "image"
            with open(image, "wb") as file:  # all of it has its place from the start
                for _ in range(LENGTHS[kind] >> 20):
                    file.write(bytes(1 << 20))
        _make_image(kind, image, LENGTHS[kind])
        os.sync()
        inner = self._cache / "image" if self._cache else self.image
        self.path = room.mount(self._place, "-o", "loop", inner)

    def unmount(self) -> None:
        assert self._room.run("umount", self._place), "still in use"
        assert not self._cache or self._room.run("umount", self._cache), "still in use"

    def mount(self, image: Path) -> None:
        """Put the disk in that `image` is of; the file system finds what was left, and mends it."""
        if self._cache:
            assert self._room.run("mount", "-o", "loop", image, self._cache), "cannot be mounted"
            image = self._cache / "image"
        assert self._room.run("mount", "-o", "loop", image, self._place), "cannot be mounted"

    def snapshot(self, target: Path) -> str:
        return copy_sparse(self.image, target)


def _make_image(kind: str, image: Path, length: int) -> None:
    with open(image, "ab") as file:
        file.truncate(length)
    subprocess.run([*_MAKERS[kind], image], check=True)


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
