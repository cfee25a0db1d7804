"""Files are damaged at any step of packing in place, or of the way back.

No byte of the model is lost, none is declared sound that is not, and both ways stay open: from the
bytes themselves where the journal is of no use any more.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from moepack.common.errors import MachineError, MoepackError, PackError
from moepack.packing.in_place import draft as in_place_draft
from moepack.packing.in_place import units
from moepack.packing.in_place.unit_files import FileSet
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.restore import restore
from moepack.storage import blocks
from tests.support import gguf_builder
from tests.support.interruptions import before_each
from tests.support.models import contents, tree

pytestmark = pytest.mark.long

STEPS = (
    *((os, name) for name in ("rename", "replace", "unlink", "ftruncate")),
    *((FileSet, "sync"), (blocks, "punch")),
)


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    """Let there be several units, and pieces that are larger than one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "MAX_LENGTH", units.CUT_ALIGNMENT)
        yield


class Moments(NamedTuple):
    """A model on its way: `root` is where it lies, `snapshots` what was there before each step."""

    root: Path
    snapshots: list[dict[str, bytes]]
    shards: dict[str, bytes]
    packed: dict[str, bytes]

    @property
    def target(self) -> Path:
        """The pack."""
        return self.root / "model.moepack"

    @property
    def source(self) -> Path:
        """The folder where the shards belong."""
        return self.root / "source"

    def lay(self, snapshot: dict[str, bytes]) -> None:
        """Put back what was there at one moment; holes are zeros, and all inodes are others."""
        shutil.rmtree(self.root)
        for folder in (self.source, self.target):
            folder.mkdir(parents=True)
        for name, data in snapshot.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if not tree(self.target):
            self.target.rmdir()

    def goes(self, way: str, recover: bool = False) -> None:
        """Go on to the pack or back to the shards; raise what that raises."""
        if way == "pack":
            source = self.source if recover else None
            pack_in_place(source, self.target, resume=True, recover=recover)
        else:
            restore(self.target, self.source if recover else None, recover=recover)

    def refusal(self, way: str) -> MoepackError | None:
        """Go on or back; return the error that this ended with."""
        try:
            self.goes(way)
        except MoepackError as error:
            return error
        return None

    def is_as_it_was(self) -> bool:
        """Return whether the pack is whole, or the shards are, and nothing else is left."""
        left = tree(self.root)
        pack = {f"model.moepack/{name}": data for name, data in self.packed.items()}
        shards = {f"source/{name}": data for name, data in self.shards.items()}
        return left in (pack, shards)


def moments(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> Moments:
    """Pack a model of 430 KiB in place, or restore it, and note all there is before each step."""
    root = folder / "root"
    source, target = root / "source", root / "model.moepack"
    model = gguf_builder.moe((0, 1), 2, ne=(160, 160))
    gguf_builder.write_shards(gguf_builder.split(model, 8), source)
    shards = contents(source)
    pack_model(source, folder / "copy")
    packed = contents(folder / "copy")
    if way == "restore":
        pack_in_place(source, target)
    snapshots: list[dict[str, bytes]] = []

    def note(*_: object) -> None:
        if (snapshot := tree(root)) not in snapshots:
            snapshots.append(snapshot)

    with monkeypatch.context() as patch:
        before_each(patch, note, *STEPS)
        if way == "pack":
            pack_in_place(source, target, threads=1)
        else:
            restore(target, source, in_place=True, threads=1)
    begun = [snapshot for snapshot in snapshots if "model.moepack/in-place/journal" in snapshot]
    return Moments(root, begun, shards, packed)


@pytest.fixture(scope="module", params=["pack", "restore"])
def on_the_way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Moments]:
    """Return the moments of both ways."""
    with pytest.MonkeyPatch.context() as patch:
        yield moments(tmp_path_factory.mktemp(request.param), patch, request.param)


def journals(line: bytes) -> Iterator[bytes | None]:
    """Yield what damage can make of a journal: None for no journal at all."""
    flipped = bytearray(line)
    flipped[len(flipped) // 2] ^= 1
    yield bytes(flipped)
    yield bytes(flipped) + line
    yield line[:-1]
    yield line[: len(line) // 2]
    yield b""
    yield b"\0" * len(line)
    yield None


@pytest.mark.parametrize(
    "step", [3, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_no_damage_to_the_journal_loses_a_byte(step: int, on_the_way: Moments) -> None:
    """Both ways are open afterwards. At some moments, and at each some damages; or all of both."""
    name = "model.moepack/in-place/journal"
    snapshots = on_the_way.snapshots
    assert len(snapshots) > 20
    if step > 1:
        snapshots = [*snapshots[:-3:20], *snapshots[-3:]]
    recovered = 0
    for number, snapshot in enumerate(snapshots):
        cases = list(itertools.product(("pack", "restore"), journals(snapshot[name])))
        for way, journal in cases[number % step :: step]:
            damaged = {key: data for key, data in snapshot.items() if key != name}
            on_the_way.lay(damaged if journal is None else damaged | {name: journal})
            before = tree(on_the_way.root)
            error = on_the_way.refusal(way)
            if isinstance(error, MachineError):
                assert error.problem == "the journal is damaged"
                assert "--recover" in (error.hint or "")
                assert tree(on_the_way.root) == before
                on_the_way.goes(way, recover=True)
                recovered += 1
            assert on_the_way.is_as_it_was(), (way, journal, str(error))
    assert recovered > len(snapshots) // step


def test_one_damaged_description_is_put_right_by_its_copy(on_the_way: Moments) -> None:
    snapshot = on_the_way.snapshots[len(on_the_way.snapshots) // 2]
    names = ("manifest.json", "manifest.json.copy", "index.bin", "index.bin.copy")
    for number, name in enumerate(names):
        path = f"model.moepack/in-place/{name}"
        whole = snapshot[path]
        at = len(whole) // 2
        flipped = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        on_the_way.lay(snapshot | {path: (flipped, whole[:at], b"")[number % 3]})
        in_place_draft.read(on_the_way.target / "in-place", on_the_way.target)
        assert (on_the_way.root / path).read_bytes() == whole
        on_the_way.goes("pack" if number % 2 else "restore")
        assert on_the_way.is_as_it_was()


def test_two_damaged_descriptions_are_refused_and_nothing_is_changed(on_the_way: Moments) -> None:
    snapshot = on_the_way.snapshots[len(on_the_way.snapshots) // 2]
    names = [f"model.moepack/in-place/index.bin{copy}" for copy in ("", ".copy")]
    on_the_way.lay(snapshot | {name: snapshot[name][:-1] + b"\1" for name in names})
    before = tree(on_the_way.root)
    for way in ("pack", "restore"):
        for recover in (False, True):
            with pytest.raises(PackError, match="both descriptions") as caught:
                on_the_way.goes(way, recover)
            assert "do not remove the directory" in (caught.value.hint or "")
            assert tree(on_the_way.root) == before


def test_a_byte_that_changed_in_a_file_is_found_before_anything_is_given_up(
    on_the_way: Moments,
) -> None:
    """In a data file, or in a shard: either the other side has it, or nothing is changed at all."""
    refused = 0
    unfinished = [s for s in on_the_way.snapshots if any(name.endswith("-source") for name in s)]
    for snapshot in unfinished[::12]:
        for name, whole in snapshot.items():
            if not whole or name.endswith(("journal", "manifest.json", "index.bin", ".copy")):
                continue
            at = len(whole) // 3
            data = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
            for way in ("pack", "restore"):
                on_the_way.lay(snapshot | {name: data})
                before = tree(on_the_way.root)
                if on_the_way.refusal(way):
                    assert tree(on_the_way.root) == before
                    refused += 1
                else:
                    assert on_the_way.is_as_it_was()
    assert refused


def test_a_directory_that_was_moved_goes_on_elsewhere(on_the_way: Moments, tmp_path: Path) -> None:
    """With other inodes, with holes that were filled, and where the shards' folder is no more."""
    snapshot = on_the_way.snapshots[len(on_the_way.snapshots) // 2]
    for way in ("pack", "restore"):
        on_the_way.lay(snapshot)
        moved = tmp_path / f"moved-{way}"
        on_the_way.root.rename(moved)
        on_the_way.root.mkdir()
        if way == "pack":
            pack_in_place(None, moved / "model.moepack", resume=True)
            assert contents(moved / "model.moepack") == on_the_way.packed
        else:
            restore(moved / "model.moepack", moved / "source")
            assert contents(moved / "source") == on_the_way.shards


def test_another_file_of_a_shards_name_and_length_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end the shards are removed one by one; a download of the next model is there."""
    packing = moments(tmp_path, monkeypatch, "pack")
    name = sorted(packing.shards)[0]
    other = bytes(len(packing.shards[name]))
    moved = "model.moepack/in-place/shard-00001"
    gone = [s for s in packing.snapshots if not any(key.startswith(moved) for key in s)]
    left = [s for s in gone if any(key.endswith("-source") for key in s)]
    assert left
    for snapshot in (gone[0], *left, gone[-1]):
        packing.lay(snapshot | {f"source/{name}": other})
        with suppress(MoepackError):
            packing.goes("pack")
        with suppress(MoepackError):
            packing.goes("restore")
        assert (packing.source / name).read_bytes() == other
