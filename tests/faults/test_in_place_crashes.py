"""Power is lost at any step of packing in place, or of going back: no byte of the model is lost.

A real file system on a loop device. At each step a copy of the device is taken without a sync; then
each copy is mounted as after a loss of power, every piece of every shard is looked for, and the
work is taken up in both directions.
"""

import os
import shutil
from collections.abc import Callable
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
from tests.support.loop_disk import LoopDisk, copy_sparse
from tests.support.machine_faults import Room
from tests.support.models import contents

UNIT_LENGTH = 64 << 10
STEPS = (
    *((os, name) for name in ("fsync", "rename", "replace", "unlink", "ftruncate")),
    (blocks, "punch"),
)


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
            digest = self.disk.snapshot(image)
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
        copy_sparse(image, copy)
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
        disks("ext4", False, 24),
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
