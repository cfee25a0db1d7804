"""Mirrors are made, added to, and removed: what is there then, and what an interruption leaves."""

import errno
import os
import shutil
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, MirrorWarning, PackError, RequestError
from moepack.packing.copies import packed_items
from moepack.storage.extents import RangeSet
from moepack.storage.folders import lock
from tests.support.interruptions import fail_at, record_calls
from tests.support.machine_faults import Room
from tests.support.models import contents, first_shard, flip, keys_of, on_disk, reads_right
from tests.support.packs import mirror

pytestmark = pytest.mark.long

HOTTEST = 300_000


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Pack a small real model in the order of the source, in the folder `first`."""
    (tmp_path / "first").mkdir()
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "first" / "pack")
    return tmp_path / "first" / "pack"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Make the folder that the other drive would be mounted on."""
    (tmp_path / "second").mkdir()
    return tmp_path / "second"


def mirrored(pack: Path) -> set[tuple[int, int]]:
    """Return the experts in a mirror; check that they are right there, and that all can be read."""
    with moepack.open(pack) as opened:
        folder = opened.mirror
        assert folder is not None
        assert folder.problem is None
        assert folder.record is not None
        experts = set()
        for key in keys_of(opened):
            where = opened.locate(*key)
            ranges = folder.record.ranges(where.path.name)
            if RangeSet(ranges).covers(where.offset, where.offset + where.length):
                experts.add(key)
                copy = where._replace(path=folder.path / where.path.name)
                assert on_disk(copy) == on_disk(where)
        with opened.reader() as reader:
            reads_right(opened, reader)
    assert moepack.verify(pack).passed
    return experts


def length_on_drive(target: Path) -> int:
    """Count the bytes that the files of mirrors take."""
    return sum(path.stat().st_blocks * 512 for path in target.glob("*.mirror/*.bin"))


def test_all_experts_are_copied_and_the_pack_is_as_it_was(pack: Path, target: Path) -> None:
    before = contents(pack)
    done: list[tuple[int, int]] = []
    summary = moepack.mirror_pack(pack, target, progress=lambda *both: done.append(both))
    folder = target / "pack.mirror"
    assert summary.path == str(folder)
    assert (summary.expert_count, summary.kept_length, summary.is_same_drive) == (32, 0, True)
    assert summary.length == summary.all_length
    assert {total for _, total in done} == {sum(length for length, _ in done)}
    assert {name: (pack / name).read_bytes() for name in before} == before
    assert os.readlink(pack / ".mirror") == str(folder)
    assert set(os.listdir(pack)) == {*before, ".mirror"}
    assert sorted(os.listdir(folder)) == ["experts-00000.bin", "experts-00001.bin", "mirror.json"]
    assert len(mirrored(pack)) == 32


def test_the_hottest_alone_are_copied(pack: Path, target: Path) -> None:
    summary = moepack.mirror_pack(pack, target, hottest=HOTTEST)
    with moepack.open(pack) as opened:
        assert mirrored(pack) == set(opened.hottest(HOTTEST))
    assert 0 < summary.length <= HOTTEST
    assert length_on_drive(target) <= HOTTEST + 65536
    with pytest.raises(RequestError, match="no expert fits"):
        moepack.mirror_pack(pack, target, hottest=100)


def test_more_is_added_to_what_is_there_and_less_is_made_anew(pack: Path, target: Path) -> None:
    few = moepack.mirror_pack(pack, target, hottest=HOTTEST)
    file = Path(few.path, "experts-00000.bin")
    with open(file, "rb") as opened:  # as a reader has it
        every = moepack.mirror_pack(pack, target)
        assert every.kept_length == few.length
        assert len(mirrored(pack)) == 32
        assert moepack.mirror_pack(pack, target).kept_length == every.length
        before = file.read_bytes()
        assert moepack.mirror_pack(pack, target, hottest=HOTTEST).kept_length == 0
        assert opened.read() == before
    assert len(mirrored(pack)) == few.expert_count
    assert not Path(few.path, "experts-00001.bin").exists()


def test_what_is_damaged_in_a_mirror_is_mended(pack: Path, target: Path) -> None:
    folder = Path(moepack.mirror_pack(pack, target).path)
    with moepack.open(pack) as opened:
        where = opened.locate(1, 3)
    flip(folder / where.path.name, where.offset + 99)
    (finding,) = moepack.verify(pack).findings
    assert (finding.kind, finding.layer, finding.expert) == ("mirror", 1, 3)
    summary = moepack.mirror_pack(pack, target)
    assert summary.length - summary.kept_length == where.length
    assert len(mirrored(pack)) == 32
    (folder / "mirror.json").write_text("{}")
    assert moepack.mirror_pack(pack, target).kept_length == 0
    assert len(mirrored(pack)) == 32


def test_every_kind_of_pack_can_be_mirrored(packs: dict[str, Path], tmp_path: Path) -> None:
    """Small parts, fused ones, several families; and shards as they are, if they have digests."""
    for model, path in packs.items():
        copy = Path(shutil.copytree(path, tmp_path / model))
        mirror(copy)
        assert moepack.verify(copy).passed
    moepack.index_model(first_shard("granite"), tmp_path / "index", digests=True)
    mirror(tmp_path / "index")
    assert moepack.verify(tmp_path / "index").findings == ()
    moepack.index_model(first_shard("granite"), tmp_path / "bare")
    with pytest.raises(PackError, match="no digests to check a mirror by"):
        mirror(tmp_path / "bare")


# Whatever interrupts it


def test_copies_are_on_the_drive_before_anything_says_so(
    pack: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is synced, then described, and then the pack gets its link."""
    events = record_calls(monkeypatch)
    moepack.mirror_pack(pack, target)
    renames = [n for n, event in enumerate(events) if event.endswith("-> mirror.json")]
    first, described = renames
    assert "pack.mirror" in events[first + 1 : described]
    for name in ("experts-00000.bin", "experts-00001.bin"):
        assert name in events[events.index(f"write {name}") : described]
    assert [event for event in events[described + 1 :] if "remove" not in event] == [
        "pack.mirror",
        ".mirror.partial -> .mirror",
        "pack",
    ]


def test_a_damaged_pack_is_not_mirrored(pack: Path, target: Path) -> None:
    with moepack.open(pack) as opened:
        where = opened.locate(0, 7)
    flip(where.path, where.offset + 5)
    with pytest.raises(PackError, match="do not have the digest") as caught:
        moepack.mirror_pack(pack, target)
    assert caught.value.path == str(where.path)
    assert not (pack / ".mirror").exists()


def test_a_copy_that_cannot_be_read_is_made_anew(
    pack: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moepack.mirror_pack(pack, target)
    fail_at(monkeypatch, 1, OSError(errno.EIO, os.strerror(errno.EIO)), (os, "preadv"))
    summary = moepack.mirror_pack(pack, target)
    assert 0 < summary.kept_length < summary.length
    assert len(mirrored(pack)) == 32


# Where it cannot be


def test_a_drive_that_is_full_is_said_to_be(pack: Path, target: Path, room: Room) -> None:
    small = room.mount(target, "-t", "tmpfs", "-o", "size=600k", "none")
    with pytest.raises(MachineError, match="not enough space"):
        moepack.mirror_pack(pack, small)
    assert not (pack / ".mirror").exists()
    summary = moepack.mirror_pack(pack, small, hottest=HOTTEST)
    assert summary.expert_count > 3
    assert not summary.is_same_drive


def test_a_drive_that_becomes_full_leaves_what_can_be_gone_on_with(
    pack: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_items, "RUN_LENGTH", 50_000)
    fail_at(monkeypatch, 4, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), (os, "pwrite"))
    with pytest.raises(MachineError, match="no space left") as caught:
        moepack.mirror_pack(pack, target)
    assert "the same command again" in str(caught.value.hint)
    assert moepack.mirror_pack(pack, target).kept_length > 0
    assert len(mirrored(pack)) == 32


def test_what_is_not_asked_for_is_left_alone(pack: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        moepack.mirror_pack(pack, tmp_path / "nowhere")
    (target / "pack.mirror").mkdir()
    (target / "pack.mirror" / "holiday.jpg").write_text("x")
    with pytest.raises(RequestError, match="is not a mirror"):
        moepack.mirror_pack(pack, target)
    (target / "pack.mirror" / "holiday.jpg").unlink()
    moepack.mirror_pack(pack, target)
    (tmp_path / "third").mkdir()
    with pytest.raises(RequestError, match="has a mirror already"):
        moepack.mirror_pack(pack, tmp_path / "third")
    other = Path(shutil.copytree(pack, tmp_path / "other" / "pack", symlinks=True))
    (other / ".mirror").unlink()
    with pytest.raises(RequestError, match="the mirror of another pack"):
        moepack.mirror_pack(other, target)
    (other / ".mirror").symlink_to(target / "pack.mirror")
    assert not moepack.remove_mirror(other).is_removed
    assert len(mirrored(pack)) == 32
    (target / "pack.mirror" / "mine.txt").write_text("x")
    assert moepack.remove_mirror(pack).is_removed
    assert os.listdir(target / "pack.mirror") == ["mine.txt"]
    with pytest.raises(RequestError, match="has no mirror"):
        moepack.remove_mirror(pack)
    with pytest.raises(PackError, match="not a pack"):
        moepack.remove_mirror(target)
    (pack / ".mirror").write_text("x")
    with pytest.raises(RequestError, match="has the name of a mirror's link"):
        moepack.mirror_pack(pack, target)


def test_one_at_a_time(pack: Path, target: Path) -> None:
    folder = Path(moepack.mirror_pack(pack, target).path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, folder)
        for call in (
            lambda: moepack.mirror_pack(pack, target),
            lambda: moepack.remove_mirror(pack),
        ):
            with pytest.raises(RequestError, match="another moepack"):
                call()
    finally:
        os.close(descriptor)
    assert len(mirrored(pack)) == 32


def test_nothing_is_removed_but_mirrors(pack: Path, tmp_path: Path) -> None:
    """Wherever the link of a pack leads that somebody else has made."""
    (pack / ".mirror").symlink_to(tmp_path / "gone")
    assert not moepack.remove_mirror(pack).is_removed
    assert not (pack / ".mirror").is_symlink()
    for name in ("thesis", "thesis.mirror"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "dense.bin").write_text("mine")
        (pack / ".mirror").symlink_to(folder)
        assert not moepack.remove_mirror(pack).is_removed
        assert os.listdir(folder) == ["dense.bin"]


# Beside the other things that are done with packs


def test_a_pack_that_is_ranked_anew_keeps_its_mirror(pack: Path, target: Path) -> None:
    moepack.mirror_pack(pack, target, hottest=HOTTEST)
    with moepack.open(pack) as opened:
        before = opened.hottest(HOTTEST)
    hotness = pack.parent / "hotness.csv"
    hotness.write_text("layer,expert,count\n1,9,7\n1,4,5\n0,0,1\n")
    assert moepack.rank_pack(pack, hotness).is_changed
    assert mirrored(pack) == set(before)
    moepack.mirror_pack(pack, target, hottest=HOTTEST)
    with moepack.open(pack) as opened:
        assert mirrored(pack) == set(opened.hottest(HOTTEST)) != set(before)


def test_restoring_and_exporting_need_no_mirror_and_mind_none(
    pack: Path, target: Path, tmp_path: Path
) -> None:
    moepack.restore(pack, tmp_path / "without")
    folder = Path(moepack.mirror_pack(pack, target).path)
    for path in folder.glob("*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    moepack.restore(pack, tmp_path / "with")
    assert contents(tmp_path / "with") == contents(tmp_path / "without")
    moepack.export("gguf", pack, tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="has a mirror, which stays behind"):
        moepack.restore(pack, tmp_path / "in place", in_place=True)
    with moepack.open(pack) as opened, opened.reader() as reader, pytest.warns(MirrorWarning):
        reads_right(opened, reader, rounds=2)
    moepack.remove_mirror(pack)
    moepack.restore(pack, tmp_path / "in place", in_place=True)
    assert contents(tmp_path / "in place") == contents(tmp_path / "without")
    assert not pack.exists()


def test_verification_reads_the_mirror_as_well(pack: Path, target: Path) -> None:
    summary = moepack.mirror_pack(pack, target)
    report = moepack.verify(pack, first_shard("qwen3moe"))
    assert report.passed
    assert report.mirror_length == summary.length
    one = moepack.verify(pack, layers=(1,))
    assert one.mirror_length is not None
    assert 0 < one.mirror_length < summary.length
    folder = Path(summary.path)
    os.truncate(folder / "experts-00000.bin", 4096)
    (folder / "experts-00001.bin").unlink()
    report = moepack.verify(pack)
    assert {finding.kind for finding in report.findings} == {"mirror"}
    assert {finding.file for finding in report.findings} == {
        "experts-00000.bin",
        "experts-00001.bin",
    }
    assert report.headline == "the mirror is damaged, the pack itself is not: mirror it again"
    shutil.rmtree(folder)
    report = moepack.verify(pack)
    assert (report.passed, report.mirror_length) == (None, None)
    assert "not there" in report.not_looked_at[0]
