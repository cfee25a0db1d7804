"""Power is lost at any step of packing in place, or of going back: no byte of the model is lost.

A real file system on a loop device. At each step a copy of the device is taken without a sync; then
each copy is mounted as after a loss of power, every piece of every shard is looked for, and the
work is taken up in both directions.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack.common.errors import MoepackError, RequestError
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import map_shards
from moepack.packing.in_place import units
from moepack.packing.in_place.unit_files import FileSet
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.restore import restore
from moepack.storage import blocks
from tests.support import gguf_builder
from tests.support.interruptions import before_each
from tests.support.machine_faults import Room
from tests.support.models import contents

UNIT_LENGTH = 64 << 10
STEPS = (
    *((os, name) for name in ("fsync", "rename", "replace", "unlink", "ftruncate")),
    (blocks, "punch"),
)
_LENGTHS = {"ext4": 24 << 20, "xfs": 320 << 20}
_MAKERS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}


class LoopDisk:
    """A new file system of `kind` on an image in `folder`, mounted in `room`.

    What it has handed to the device is in the image, and not what it still holds in memory: a copy
    of that, taken without a sync, is what a loss of power leaves. With `has_cache` the disk has a
    cache of its own that power is lost to: the image lies in a file system on another image, to
    which it is written only when the disk is told to flush. `path` is where it is seen. Skips the
    test where there is no such file system or no loop device.
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
            _make_image("ext4", self.image, _LENGTHS[kind] + _LENGTHS["ext4"])
            image = room.mount(self._cache, "-o", "loop", self.image) / "image"
            with open(image, "wb") as file:  # all of it has its place from the start
                for _ in range(_LENGTHS[kind] >> 20):
                    file.write(bytes(1 << 20))
        _make_image(kind, image, _LENGTHS[kind])
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


def _make_image(kind: str, image: Path, length: int) -> None:
    with open(image, "ab") as file:
        file.truncate(length)
    subprocess.run([*_MAKERS[kind], image], check=True)


def _copy_sparse(path: Path, target: Path) -> str:
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


class Model(NamedTuple):
    """A model, what an undisturbed pack of it holds, and where each piece of a shard lies in it."""

    source: Path
    shards: dict[str, bytes]
    packed: dict[str, bytes]
    pieces: list[tuple[str, int, int, str, int]]
    """Shard, offset and length there, data file, offset there."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Build a model of 600 KiB: three layers in two shards."""
    folder = tmp_path_factory.mktemp("model")
    source = folder / "source"
    gguf_builder.write_shards(gguf_builder.split(gguf_builder.moe(ne=(128, 96)), 8), source)
    pack_model(source, folder / "pack")
    with Pack(folder / "pack") as pack:
        names = [file.name for file in pack.index.files]
        pieces = [
            (shard.name, piece.offset, piece.length, names[piece.input], piece.input_offset)
            for shard in map_shards(pack)
            for piece in shard.pieces
        ]
    return Model(source, contents(source), contents(folder / "pack"), pieces)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be several units, and pieces that are larger than one."""
    monkeypatch.setattr(units, "MAX_LENGTH", UNIT_LENGTH)


class Crashes:
    """Loses power at each step of some work on `model`, which is on a disk of its own."""

    def __init__(
        self, kind: str, model: Model, folder: Path, room: Room, *, has_cache: bool = False
    ) -> None:
        self.model = model
        self.disk = LoopDisk(kind, folder, room, has_cache=has_cache)
        self.source = self.disk.path / "source"
        self.target = self.disk.path / "model.moepack"
        self.images = folder / "images"
        self.images.mkdir()
        shutil.copytree(model.source, self.source)
        os.sync()

    def record(self, work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Do `work`; return what was on the disk before each of its steps, and at the end."""
        by_digest: dict[str, Path] = {}

        unlink = os.unlink  # what a snapshot does is no step

        def snapshot(*_: object) -> None:
            image = self.images / f"{len(by_digest):04}"
            digest = _copy_sparse(self.disk.image, image)
            if by_digest.setdefault(digest, image) is not image:
                unlink(image)

        with monkeypatch.context() as patch:
            before_each(patch, snapshot, *STEPS)
            work()
        snapshot()
        self.disk.unmount()
        return list(by_digest.values())

    def after(self, image: Path, *works: Callable[[], Any]) -> Any:
        """Do `works` on a copy of what a loss of power left; return what the last one does."""
        copy = self.images / "copy"
        copy.unlink(missing_ok=True)
        _copy_sparse(image, copy)
        self.disk.mount(copy)
        try:
            return [work() for work in works][-1]
        finally:
            self.disk.unmount()

    def lost(self) -> list[tuple[str, int]]:
        """List the pieces that are neither in a shard nor in the pack."""
        shards = {name: read(path) for name, path in self.shard_paths().items()}
        files = {name: read(self.target / name) for name in self.model.packed}
        lost = []
        for shard, shard_offset, length, file, offset in self.model.pieces:
            expected = self.model.shards[shard][shard_offset : shard_offset + length]
            in_shard = shards[shard][shard_offset : shard_offset + length]
            if expected not in (in_shard, files[file][offset : offset + length]):
                lost.append((shard, shard_offset))
        return lost

    def shard_paths(self) -> dict[str, Path]:
        """Return where each shard is: under its own name, or under one that no program loads."""
        count = len(self.model.shards)
        inner = self.target / "in-place"
        paths = {}
        for number, name in enumerate(sorted(self.model.shards), 1):
            moved = inner / f"shard-{number:05}-of-{count:05}.moepack-source"
            home = self.source / name
            paths[name] = home if home.exists() else moved
            if home.exists() and not moved.exists():
                assert home.read_bytes() == self.model.shards[name], "a shard with holes has a name"
        return paths

    def resume(self) -> None:
        """Go on to the pack, or begin where nothing was begun."""
        if not (self.target / "manifest.json").exists() or (self.target / "in-place").exists():
            try:
                pack_in_place(None, self.target, resume=True)
            except RequestError:
                assert contents(self.source) == self.model.shards
                pack_in_place(self.source, self.target)
        assert contents(self.target) == self.model.packed

    def restore(self) -> None:
        """Go back to the shards."""
        if self.target.exists() and os.listdir(self.target):
            try:
                restore(self.target, self.source, in_place=True)
            except MoepackError:
                assert contents(self.source) == self.model.shards
        assert contents(self.source) == self.model.shards


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


Record = Callable[[Crashes, pytest.MonkeyPatch], list[Path]]


def record_packing(crashes: Crashes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Pack in place."""
    return crashes.record(
        lambda: pack_in_place(crashes.source, crashes.target, threads=1), monkeypatch
    )


def record_restoring(crashes: Crashes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Turn a whole pack back into its shards."""
    pack_in_place(crashes.source, crashes.target)
    os.sync()
    return crashes.record(
        lambda: restore(crashes.target, crashes.source, in_place=True, threads=1), monkeypatch
    )


def disks(kind: str, has_cache: bool, step: int) -> Any:
    marks = [] if step > 1 else [pytest.mark.slow, pytest.mark.timeout(600)]
    return pytest.param(kind, has_cache, step, marks=marks)


@pytest.mark.parametrize("record", [record_packing, record_restoring])
@pytest.mark.parametrize(
    ("kind", "has_cache", "step"),
    [
        disks("ext4", False, 32),
        *(disks(kind, has_cache, 1) for kind in ("ext4", "xfs") for has_cache in (False, True)),
    ],
)
def test_nothing_is_lost_at_any_step(
    kind: str,
    has_cache: bool,
    step: int,
    record: Record,
    model: Model,
    tmp_path: Path,
    room: Room,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways can be taken then. Also if the disk loses writes that were not flushed."""
    crashes = Crashes(kind, model, tmp_path, room, has_cache=has_cache)
    images = record(crashes, monkeypatch)
    assert len(images) > 30

    def nothing_is_lost() -> None:
        assert crashes.lost() == []

    for image in images[::step]:
        crashes.after(image, nothing_is_lost, crashes.resume)
        crashes.after(image, crashes.restore)


def without_sync(patch: pytest.MonkeyPatch) -> None:
    """Give one side up before what was written on the other is on the disk, and was read there.

    Dropping what is cached makes the system write it, so that has to be left out as well.
    """
    patch.setattr(FileSet, "sync", lambda *_: None)
    patch.setattr(FileSet, "drop_cached", lambda *_: None)


def test_without_a_step_of_the_order_bytes_are_lost(
    model: Model, tmp_path: Path, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: they find it where the order is broken."""
    crashes = Crashes("ext4", model, tmp_path, room)
    with monkeypatch.context() as patch:
        without_sync(patch)
        images = record_packing(crashes, monkeypatch)
    losses = [len(crashes.after(image, crashes.lost)) for image in images[::3]]
    assert sum(map(bool, losses)) >= 2, losses
