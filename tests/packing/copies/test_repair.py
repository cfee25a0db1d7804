"""What is damaged in a pack is written back, and nothing else is touched."""

import itertools
import os
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MoepackError, PackError, RequestError, SourceError
from tests.support.damages import (
    DAMAGES,
    Damage,
    change_a_byte,
    change_padding_between_parts,
    cut,
    mtime_kept,
)
from tests.support.interruptions import before_each
from tests.support.models import first_shard, flip
from tests.support.pulls import copy_pack, is_same

SOURCE = first_shard("qwen3moe")
FILE = "experts-00001.bin"


@pytest.fixture
def pack(hot_pack: Path, tmp_path: Path) -> Path:
    return copy_pack(hot_pack, tmp_path, "here")


def part(pack: Path, name: str = "down", expert: int = 4) -> moepack.PartLocation:
    with moepack.Pack(pack) as opened:
        return opened.locate(1, expert, name)


def damage_part(pack: Path, name: str = "down", expert: int = 4) -> moepack.PartLocation:
    where = part(pack, name, expert)
    flip(where.path, where.offset + 9)
    return where


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_of_a_data_file_is_repaired_from_a_copy(
    damage: Damage, pack: Path, hot_pack: Path
) -> None:
    damage(pack / FILE)
    summary = moepack.repair(pack, hot_pack)
    assert is_same(pack, hot_pack)
    assert summary.digests.compared_length == summary.digests.known_length > 0
    assert summary.origin == (str(hot_pack) if summary.repaired else None)
    assert bool(summary.repaired) == (damage in (change_a_byte, cut, Path.unlink))


def test_it_is_repaired_from_the_shards(pack: Path, hot_pack: Path) -> None:
    where = damage_part(pack)
    with moepack.Pack(pack) as opened:
        tensor = next(one for one in opened.dense() if one.length)
    flip(tensor.path, tensor.offset)
    flip(pack / "dense.bin", 0)  # the header of the first shard, or a tensor
    summary = moepack.repair(pack, SOURCE)
    assert is_same(pack, hot_pack)
    assert f"layer 1 expert 4 {where.part}" in summary.repaired
    assert f"tensor {tensor.name}" in summary.repaired


def test_it_is_repaired_from_a_store(address: str, pack: Path, hot_pack: Path) -> None:
    damage_part(pack)
    assert len(moepack.repair(pack, address).repaired) == 1
    assert is_same(pack, hot_pack)


def test_its_own_mirror_is_a_source(pack: Path, hot_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    mirror = moepack.mirror_pack(pack, tmp_path / "second")
    damage_part(pack)
    assert moepack.repair(pack).origin == mirror.path
    assert not moepack.verify(pack).findings
    with moepack.Pack(pack) as opened:
        tensor = next(one for one in opened.dense() if one.length)
    damage_part(pack)
    flip(tensor.path, tensor.offset)
    with pytest.raises(PackError, match="tensor .*1 of 2 damaged ranges are not in") as caught:
        moepack.repair(pack)
    assert "`source`" in (caught.value.hint or "")
    (finding,) = moepack.verify(pack).findings
    assert finding.tensor == tensor.name


def test_the_part_alone_is_written(
    pack: Path, hot_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = damage_part(pack)
    written: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def record(descriptor: int, data: bytes, offset: int) -> int:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(where.path)
        written.append((offset, offset + len(data)))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", record)
    summary = moepack.repair(pack, hot_pack)
    assert min(start for start, _ in written) == where.offset
    assert max(end for _, end in written) == where.offset + where.length
    assert summary.written_length == where.length
    assert summary.repaired == (f"layer 1 expert 4 {where.part}",)


def test_it_is_read_from_the_drive_before_and_after(
    pack: Path, hot_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_part(pack)
    events: list[str] = []
    before_each(
        monkeypatch, lambda name, *_: events.append(name), (os, "pwrite"), (os, "posix_fadvise")
    )
    moepack.repair(pack, hot_pack)
    names = [name for name, _ in itertools.groupby(events)]
    assert names == ["posix_fadvise", "pwrite", "posix_fadvise"]


def test_a_sound_pack_is_not_touched(pack: Path, hot_pack: Path) -> None:
    def stamps() -> list[tuple[int, int]]:
        return [(one.stat().st_mtime_ns, one.stat().st_ctime_ns) for one in pack.iterdir()]

    before = stamps()
    summary = moepack.repair(pack)
    assert (summary.repaired, summary.written_length, summary.origin) == ((), 0, None)
    assert summary.digests.compared_length == summary.digests.known_length > 0
    assert stamps() == before


def test_padding_needs_no_source(pack: Path, hot_pack: Path) -> None:
    change_padding_between_parts(pack / FILE)
    assert moepack.repair(pack).padding_length > 0
    assert is_same(pack, hot_pack)


@pytest.mark.parametrize("name", ["index.bin", "manifest.json"])
@pytest.mark.parametrize("damage", [change_a_byte, Path.unlink])
def test_index_and_manifest_come_from_a_copy_if_the_other_proves_the_pack(
    damage: Damage, name: str, pack: Path, hot_pack: Path
) -> None:
    damage(pack / name)
    for source in (None, SOURCE):
        with pytest.raises(PackError) as caught:
            moepack.repair(pack, source)
        assert "another copy of the pack" in (caught.value.hint or "")
    flip(pack / FILE, 0)
    summary = moepack.repair(pack, hot_pack)
    assert summary.repaired[0] == name
    assert len(summary.repaired) == 2
    assert is_same(pack, hot_pack)


def test_nothing_says_which_pack_it_is_without_index_and_manifest(
    pack: Path, hot_pack: Path
) -> None:
    change_a_byte(pack / "index.bin")
    change_a_byte(pack / "manifest.json")
    flip(pack / FILE, 0)
    before = (pack / FILE).read_bytes()
    with pytest.raises(PackError, match="neither its manifest nor its index"):
        moepack.repair(pack, hot_pack)
    assert (pack / FILE).read_bytes() == before


def test_what_is_no_source_of_the_pack_is_refused_and_writes_nothing(
    pack: Path, packs: dict[str, Path], tmp_path: Path
) -> None:
    damage_part(pack)
    before = {path.name: path.read_bytes() for path in pack.iterdir()}
    sources: tuple[tuple[Path, type[MoepackError], str], ...] = (
        (packs["granite"], PackError, "another pack"),
        (first_shard("granite"), SourceError, "not the shards that the pack was made from"),
        (tmp_path / "none", MoepackError, "none"),
    )
    for source, fault, words in sources:
        with pytest.raises(fault, match=words):
            moepack.repair(pack, source)
    with pytest.raises(PackError, match="layer 1 expert 4 .*no source") as caught:
        moepack.repair(pack)
    assert "`source`" in (caught.value.hint or "")
    with pytest.raises(RequestError, match="in a store"):
        moepack.repair("https://127.0.0.1:9/a", pack)
    assert {path.name: path.read_bytes() for path in pack.iterdir()} == before


def test_bytes_that_are_wrong_in_the_copy_as_well_are_never_written(
    pack: Path, hot_pack: Path, tmp_path: Path
) -> None:
    """The rest is repaired; what cannot be stays as it was, for a better copy."""
    copy = copy_pack(hot_pack, tmp_path, "copy")
    where = damage_part(pack)
    damage_part(pack, expert=7)
    in_copy = part(copy)
    flip(in_copy.path, in_copy.offset + 99)
    before = where.path.read_bytes()[where.offset : where.offset + where.length]
    with pytest.raises(PackError, match="layer 1 expert 4 .*1 of 2 damaged ranges could"):
        moepack.repair(pack, copy)
    assert where.path.read_bytes()[where.offset : where.offset + where.length] == before
    (finding,) = moepack.verify(pack).findings
    assert (finding.expert, finding.part) == (4, where.part)
    assert moepack.repair(pack, hot_pack).repaired == (f"layer 1 expert 4 {where.part}",)
    assert is_same(pack, hot_pack)


def test_a_part_of_a_pack_is_repaired_from_where_it_came(
    address: str, hot_pack: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "part"
    moepack.pull(address, folder, layers="1")
    where = part(folder)
    with mtime_kept(where.path):
        flip(where.path, where.offset)
    summary = moepack.repair(folder)
    assert summary.repaired == (f"layer 1 expert 4 {where.part}",)
    assert summary.origin == address
    assert not moepack.verify(folder).findings
    assert moepack.pull(address, folder).is_whole
    assert is_same(folder, hot_pack)
