"""Shards become a pack in place, and come back: what it takes, what it leaves, what it refuses."""

import contextlib
import ctypes
import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moepack.cli import main
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError, SourceError
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import ShardMap
from moepack.pack.verifying.verifier import verify
from moepack.packing.in_place import units
from moepack.packing.in_place.unfinished import Unfinished
from moepack.packing.in_place.units import FreeableBlocks, Units
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.restore import restore
from moepack.packing.writing.lock_file import LockFile
from moepack.storage import blocks
from moepack.storage.extents import Extent
from moepack.storage.folders import free_space, shortage
from tests.support import gguf_builder
from tests.support.children import MOEPACK, Piped
from tests.support.damages import DAMAGES, Damage, change_a_byte, lengthen
from tests.support.file_systems import mounted
from tests.support.interruptions import StopHereError, before_each
from tests.support.models import (
    FIXTURES,
    contents,
    flip,
    hotness_of,
    shards_of,
    tree,
)
from tests.support.terminals import Terminal
from tests.support.warm_command import Run

pytestmark = pytest.mark.long

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return the shards of a small model."""
    folder = tmp_path / "source"
    gguf_builder.write_shards(gguf_builder.split(gguf_builder.moe(ne=(128, 96)), 8), folder)
    return folder


def stop_after(share: float, read_count: int = 1) -> Callable[[int, int], None]:
    """Return a progress callback that interrupts when a share of the bytes is carried over.

    Before that all of the model is read so many times.
    """
    done = read_length = 0

    def progress(length: int, total: int) -> None:
        nonlocal done, read_length
        read_length = read_length or total * read_count // (read_count + 1)
        done += length
        if done > read_length and done >= read_length + share * (total - read_length):
            raise StopHereError

    return progress


def interrupt(source: Path, target: Path, share: float, **options: Any) -> None:
    """Pack in place until a share of the bytes is moved."""
    with pytest.raises(StopHereError):
        pack_in_place(source, target, progress=stop_after(share, 2), threads=1, **options)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_LENGTH", units.CUT_ALIGNMENT)


# What it leaves


@pytest.mark.parametrize(
    ("model", "layout", "unit_count"),
    [
        ("deepseek2", "layers", 3),
        ("gpt-oss", "layers", 20),
        ("granite", "layers", 20),
        ("qwen3moe", "hot-first", 3),
        ("qwen3moe", "natural", 20),
    ],
)
def test_the_pack_is_the_one_that_a_copy_makes_and_the_shards_come_back(
    model: str, layout: str, unit_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are layers; or so small that there are many, and experts and tensors are cut."""
    if unit_count > 3:
        monkeypatch.setattr(units, "MAX_LENGTH", units.CUT_ALIGNMENT)
    source = tmp_path / "source"
    source.mkdir()
    for path in shards_of(model):
        shutil.copy(path, source)
    before = contents(source)
    options: dict[str, Any] = {"layout": layout, "sha256": True}
    if model == "qwen3moe":
        options |= {"hotness": HOTNESS, "alignment": 16 << 10}
    pack_model(source, tmp_path / "copy", **options)
    summary = pack_in_place(source, tmp_path / "pack", **options)
    assert contents(tmp_path / "pack") == contents(tmp_path / "copy")
    assert contents(source) == {}
    assert summary.in_place is not None
    assert summary.in_place.unit_count >= unit_count
    restored = restore(tmp_path / "pack", source, in_place=True)
    assert contents(source) == before
    assert restored.is_in_place
    assert restored.sha256_count == len(before)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.99])
def test_what_was_interrupted_goes_on_or_back_from_what_lies_in_the_directory(
    share: float, source: Path, small_units: None, tmp_path: Path
) -> None:
    """Neither the shards' names nor the hotness are asked for again."""
    before = contents(source)
    times = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    hotness = hotness_of({(layer, 1): 5 for layer in range(3)})
    options: dict[str, Any] = {"layout": "hot-first", "hotness": hotness}
    copied = pack_model(source, tmp_path / "copy", **options)
    target, moved = tmp_path / "pack", tmp_path / "moved"
    interrupt(source, target, share, **options)
    if share:
        assert contents(source) == {}
        shutil.copytree(target, moved)
        summary = pack_in_place(None, moved, resume=True)
        restored = restore(target)
        assert 0 < restored.kept_length < restored.length
    assert contents(source) == before
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == times
    assert not target.exists()
    if not share:  # nothing was in the pack: all is as it was
        summary = pack_in_place(source, moved, **options)
    assert contents(moved) == contents(tmp_path / "copy")
    assert (summary.layout, summary.order) == ("hot-first", "hotness")
    lengths = summary.data_length, summary.padding_length
    assert lengths == (copied.data_length, copied.padding_length)


def test_the_command_says_where_an_interrupted_model_is_and_what_comes_next(
    source: Path, small_units: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "pack"
    shutil.copytree(source, source.parent / "other")
    interrupt(source, target, 0.5)
    with pytest.raises(PackError, match="not a whole pack") as caught:
        verify(target)
    assert "do not remove it" in (caught.value.hint or "")
    packing = ["pack", "--in-place", "-o", str(target)]
    for options in (["--in-place", "--yes-delete-source"], ["--resume"], []):
        assert main.run(["pack", "-o", str(target), str(source.parent / "other"), *options]) == 2
        errors = capsys.readouterr().err
        problem = "a pack that is made in place is here, unfinished: it may hold the only copy"
        assert errors.startswith(f"error: {target}: {problem}")
        assert "hint: go on with --in-place and --resume" in errors
    with open(next((target / "in-place").glob("shard-*")), "rb"):
        assert main.run([*packing, "--resume"]) == 2
    errors = capsys.readouterr().err
    assert "another program has it open" in errors
    assert f"go on with `moepack pack --in-place --resume -o {target}`" in errors
    assert "do not remove the directory" in errors
    assert main.run([*packing, "--resume"]) == 0
    assert capsys.readouterr().out.endswith(f"\nnext: moepack verify {target}\n")


def test_it_takes_no_more_space_than_it_says_and_no_program_loads_a_file_with_holes(
    source: Path, small_units: None, tmp_path: Path
) -> None:
    """Shards and pack together grow by a unit, padding, and the blocks at borders."""

    def taken() -> int:
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        return sum(512 * path.stat().st_blocks for path in paths if path.exists())

    def look(_length: int, _total: int) -> None:
        most.append(taken())
        for path in tmp_path.rglob("*.gguf*"):
            with open(path, "rb") as file:
                assert blocks.hole_in(file.fileno(), 0, path.stat().st_size) is None

    most: list[int] = []
    before = taken()
    summary = pack_in_place(source, tmp_path / "pack", progress=look, threads=1)
    assert summary.in_place is not None
    model_length = sum(shard.length for shard in summary.in_place.shards)
    measured = max(most) - before
    assert measured <= summary.in_place.extra_length
    assert measured < model_length // 2  # a copy would take all of it
    before = taken()
    restore(tmp_path / "pack", source, in_place=True, progress=look, threads=1)
    assert max(most) - before <= summary.in_place.extra_length
    assert len(most) > 20


# Bytes that are wrong


@pytest.mark.parametrize("name", ["dense.bin", "experts-00001.bin"])
def test_a_damaged_pack_is_not_turned_into_shards_but_left_as_it_is(
    name: str, small_units: None, tmp_path: Path
) -> None:
    """Also if the piece that is damaged would be cut."""
    gguf_builder.moe((0, 1), 2, ne=(512, 512)).write(tmp_path / "model.gguf")
    target = tmp_path / "pack"
    pack_model(tmp_path / "model.gguf", target)
    flip(target / name, 100)
    before = contents(target)
    with pytest.raises(PackError, match="damaged"):
        restore(target, tmp_path / "elsewhere", in_place=True)
    assert contents(target) == before


def test_bytes_that_neither_side_has_are_named_and_nothing_is_changed(
    source: Path, small_units: None, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    interrupt(source, target, 0.5)
    flip(target / "experts-00000.bin", 5000)
    before = tree(tmp_path)
    for work in (
        partial(pack_in_place, None, target, resume=True),
        partial(restore, target),
        partial(restore, target, source, recover=True),
    ):
        with pytest.raises(PackError, match="neither the pack nor the shards") as caught:
            work()
        assert "layer 0 expert" in str(caught.value)
        assert "found 1 such pieces in all" in str(caught.value)
        assert "nothing was changed" in (caught.value.hint or "")
        assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("way", "fails", "hint", "follow"),
    [
        ("pack", (Unfinished, "sync"), None, "pack"),
        ("pack", (Unfinished, "begin"), None, "pack"),
        ("restore", (Unfinished, "begin"), None, "restore"),
        ("pack", (Unfinished, "take_shards"), None, "pack"),
        ("restore", (Unfinished, "make_shards"), None, "restore"),
        ("pack", (Unfinished, "remove_shards"), "the pack is whole", "resume"),
        ("pack", (Unfinished, "clean_up"), "the pack is whole", "resume"),
        ("pack", (LockFile, "remove"), "go on with", "resume"),
        ("pack", (Unfinished, "clean_up"), "the pack is whole", "go back"),
        ("restore", (Unfinished, "remove_data_files"), "or back with", "go back"),
        ("restore", (Unfinished, "clean_up"), "the shards are where they belong", "nothing left"),
    ],
)
def test_what_fails_before_the_first_unit_or_after_the_last_says_what_is_true_then(
    way: str,
    fails: tuple[type, str],
    hint: str | None,
    follow: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def nothing_left() -> None:
        with pytest.raises(RequestError, match="already where they belong"):
            restore(target)

    before, target = contents(source), tmp_path / "pack"
    works: dict[str, Callable[[], object]] = {
        "pack": lambda: pack_in_place(source, target),
        "restore": lambda: restore(target, source, in_place=True),
        "resume": lambda: pack_in_place(None, target, resume=True),
        "go back": lambda: restore(target),
        "nothing left": nothing_left,
    }
    if way == "restore":
        works["pack"]()
        packed = contents(target)
    with monkeypatch.context() as patch:
        patch.setattr(*fails, fail)
        with pytest.raises(MachineError) as caught:
            works[way]()
    assert (hint or "") in (caught.value.hint or "")
    if hint is None:  # all is as it was
        assert caught.value.hint is None
        assert (contents(source) == before) if way == "pack" else (contents(target) == packed)
        assert not (target / "in-place").exists()
    works[follow]()
    is_pack = way == "pack" and follow != "go back"
    assert (target / "manifest.json").exists() == is_pack
    assert not (target / "in-place").exists()
    assert is_pack or contents(source) == before


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((damage, "experts-00001.bin") for damage in DAMAGES),
        *((change_a_byte, name) for name in ("dense.bin", "index.bin", "manifest.json")),
        *((Path.unlink, name) for name in ("dense.bin", "index.bin", "manifest.json")),
    ],
)
def test_leftovers_beside_a_pack_stay_until_it_is_found_sound(
    damage: Damage, name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stamp tells of the damage. Leftovers know manifest and index, and where shards were."""
    before, target = contents(source), tmp_path / "pack"

    def fail(*_: object) -> None:
        raise StopHereError

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "clean_up", fail)
        with pytest.raises(StopHereError):
            pack_in_place(source, target)
    packed = tree(target)
    damage(target / name)
    damaged = tree(target)
    if name in ("index.bin", "manifest.json") and (target / "manifest.json").exists():
        pack_in_place(None, target, resume=True)
        assert contents(target) == {n: d for n, d in packed.items() if "/" not in n}
        return
    if name != "manifest.json":
        with pytest.raises(PackError, match="the pack is damaged"):
            pack_in_place(None, target, resume=True)
        assert tree(target) == damaged
    (target / name).write_bytes(packed[name])
    copied = restore(target, tmp_path / "copy")
    assert (copied.is_in_place, contents(tmp_path / "copy")) == (False, before)
    assert restore(target).is_in_place
    assert contents(source) == before
    assert not target.exists()


def test_a_whole_shard_that_became_longer_on_its_way_home_gets_its_length_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, target = contents(source), tmp_path / "pack"

    def stop(*_: object) -> None:
        raise StopHereError

    pack_in_place(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "restore_names", stop)
        with pytest.raises(StopHereError):
            restore(target, source, in_place=True)
    for shard in (target / "in-place").glob("shard-*"):
        lengthen(shard)
    restore(target)
    assert contents(source) == before


def test_a_restoring_that_was_killed_before_its_journal_begins_again(
    source: Path, tmp_path: Path
) -> None:
    before, target = contents(source), tmp_path / "pack"
    pack_in_place(source, target)
    (target / "in-place").mkdir()
    (target / "in-place" / "journal").touch()
    restore(target, source, in_place=True)
    assert contents(source) == before


def test_a_shard_that_is_opened_just_when_it_is_moved_goes_back_with_the_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, target, rename = contents(source), tmp_path / "pack", os.rename
    with contextlib.ExitStack() as opened:

        def rename_and_open(old: Path, new: Path) -> None:
            rename(old, new)
            if target in Path(new).parents:
                opened.enter_context(open(new, "rb"))

        monkeypatch.setattr(os, "rename", rename_and_open)
        with pytest.raises(RequestError, match="another program has it open") as caught:
            pack_in_place(source, target)
    assert str(caught.value).startswith(f"{shard(source).parent}/")
    assert caught.value.hint == "end that program, and try again"
    assert not getattr(caught.value, "__notes__", [])
    assert contents(source) == before
    assert not target.exists()


def test_of_two_that_pack_the_same_shards_one_leaves_nothing(
    source: Path, small_units: None, tmp_path: Path
) -> None:
    """Whenever the other one comes: while the first reads, or while it carries over."""

    def meanwhile(_length: int, _total: int) -> None:
        if next(calls) % 12 == 0:
            with pytest.raises((SourceError, RequestError)):
                pack_in_place(source, other)
            assert not other.exists()

    calls = itertools.count()
    target, other = tmp_path / "pack", tmp_path / "other"
    pack_model(source, tmp_path / "copy")
    pack_in_place(source, target, progress=meanwhile)
    assert contents(target) == contents(tmp_path / "copy")
    assert next(calls) > 20


# What it refuses


def refused(source: Path, target: Path) -> list[str]:
    """Return what speaks against packing in place; it is refused, and nothing is touched."""
    before = contents(source)
    dry = pack_in_place(source, target, dry_run=True)
    assert dry.in_place is not None
    if dry.in_place.refusals:
        with pytest.raises(MoepackError) as caught:
            pack_in_place(source, target)
        # The free space may have changed since: other programs write too.
        messages = (str(caught.value), dry.in_place.refusals[0])
        assert len({message.partition(", found")[0] for message in messages}) == 1
        assert len(getattr(caught.value, "__notes__", [])) == len(dry.in_place.refusals) - 1
    assert contents(source) == before
    assert not (target / "in-place").exists()
    return list(dry.in_place.refusals)


def shard(source: Path) -> Path:
    return sorted(source.iterdir())[1]


def link_to_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "blob")
    path.symlink_to(path.parent.parent / "blob")


def punch(path: Path) -> None:
    with open(path, "r+b") as file:
        blocks.punch(file.fileno(), path.stat().st_size // 4096 // 2 * 4096, 4096)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: os.link(path, path.parent.parent / "b"), "(hard links), found 2 names"),
        (link_to_elsewhere, "a link to a file elsewhere"),
        (lambda path: path.chmod(0o444), "marked read-only"),
        (punch, "has holes already"),
    ],
)
def test_files_that_cannot_be_given_up_are_refused(
    change: Callable[[Path], None],
    reason: str,
    source: Path,
    tmp_path: Path,
) -> None:
    assert refused(source, tmp_path / "pack") == []
    change(shard(source))
    (refusal,) = refused(source, tmp_path / "pack")
    assert reason in refusal


@pytest.mark.parametrize(
    ("result", "reason"), [(0, "cannot free a part of a file"), (-1, "No space left")]
)
def test_a_file_system_without_holes_and_a_drive_that_fails_are_refused(
    result: int, reason: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(*_: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return result  # 0 as if it were done

    monkeypatch.setattr(blocks, "_fallocate", fallocate)
    refusals = refused(source, tmp_path / "pack")
    assert [reason in refusal for refusal in refusals] == [True, True]


@pytest.mark.parametrize("way", ["pack", "restore"])
def test_too_little_space_is_refused_and_all_is_left_as_it_is(
    way: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moepack.packing.in_place import work as in_place_work

    if way == "restore":
        pack_model(source, tmp_path / "pack")
    monkeypatch.setattr(in_place_work, "MARGIN", 1 << 60)
    before = tree(tmp_path)
    if way == "pack":
        (refusal,) = refused(source, tmp_path / "pack")
        assert "not enough space" in refusal
    else:
        with pytest.raises(MachineError, match="not enough space"):
            restore(tmp_path / "pack", tmp_path / "restored", in_place=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_files_in_use_are_refused_and_their_user_is_named(
    how: str, source: Path, tmp_path: Path
) -> None:
    code = "import mmap, sys; f = open(sys.argv[1], 'rb')\n"
    if how == "mapped":
        code += "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); f.close()\n"
    code += "print('ready', flush=True); sys.stdin.read()"
    with Piped(sys.executable, "-c", code, shard(source)) as user:
        assert user.stdout.readline() == "ready\n"
        (refusal,) = refused(source, tmp_path / "pack")
        user.communicate()
    assert "open, or mapped" in refusal
    assert f"({user.pid})" in refusal


def test_a_pack_that_a_reader_has_open_is_not_turned_back(source: Path, tmp_path: Path) -> None:
    """Even if it has not read from its data files yet."""
    pack_model(source, tmp_path / "pack")
    with Pack(tmp_path / "pack"), pytest.raises(RequestError, match="has it open, or mapped"):
        restore(tmp_path / "pack", tmp_path / "restored", in_place=True)
    assert (tmp_path / "pack" / "manifest.json").exists()
    restore(tmp_path / "pack", tmp_path / "restored", in_place=True)


def test_another_file_system_is_refused(source: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == source.stat().st_dev:
        pytest.skip("no other file system")
    refusals = refused(source, shared / f"moepack-{os.getpid()}" / "pack")
    assert len(refusals) == len(list(source.iterdir()))
    assert "nothing would be saved" in refusals[0]


def test_a_few_bytes_too_little_can_be_seen_in_the_message(tmp_path: Path) -> None:
    error = shortage(tmp_path, free_space(tmp_path) + (1 << 20))
    assert error is not None
    assert f"{error.expected} free" != error.found


def test_shards_go_home_without_room_where_none_was_carried_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else fills the disk between the check and the work."""
    from moepack.packing.in_place import work as in_place_work

    def fill(*_: object) -> None:
        monkeypatch.setattr(in_place_work, "MARGIN", 1 << 60)

    before = contents(source)
    before_each(monkeypatch, fill, (Unfinished, "sync"))
    with pytest.raises(MachineError, match="not enough space"):
        pack_in_place(source, tmp_path / "pack")
    assert contents(source) == before
    assert not (tmp_path / "pack").exists()


def test_a_shard_in_the_way_is_not_overwritten(
    source: Path, small_units: None, tmp_path: Path
) -> None:
    target, name = tmp_path / "pack", shard(source)
    before = contents(source)
    pack_in_place(source, target)
    name.write_text("another")
    with pytest.raises(RequestError, match="exists already"):
        restore(target, source, in_place=True)
    assert name.read_text() == "another"
    assert (target / "manifest.json").exists()
    restore(target, source, in_place=True, force=True)
    assert contents(source) == before


# Units and blocks, which are arithmetic


def mapped(*lengths: int) -> ShardMap:
    """Map a shard of pieces with 32 bytes of zeros between them, first to last in one file."""
    pieces, offset, shard_offset = [], 0, 0
    for length in lengths:
        pieces.append(Extent(shard_offset, length, 0, offset, None, "piece"))
        offset += -(-length // 4096) * 4096
        shard_offset += length + 32
    return ShardMap("shard", shard_offset - 32, tuple(pieces))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_a_block_may_go_when_all_in_it_may_and_not_before(
    lengths: list[int], order: random.Random
) -> None:
    """Whatever the order: each range that is freed has no byte of a piece that is not packed."""
    shard = mapped(*lengths)
    blocks = FreeableBlocks([shard], 4096)
    pieces = Units([shard], [1 << 30], 1 << 20).pieces
    order.shuffle(pieces)
    left = {piece.shard_offset: piece for piece in pieces}
    freed: set[int] = set()
    for piece in pieces:
        if piece.shard_offset:
            del left[piece.shard_offset]
        start, end = blocks.add(piece) or (0, 0)
        assert start % 4096 == end % 4096 == 0
        new = set(range(start, end, 4096))
        assert not new & freed
        freed |= new
        for other in left.values():
            other_end = other.shard_offset + other.length
            assert not any(at < other_end and at + 4096 > other.shard_offset for at in new)
    first_free = -(-lengths[0] // 4096) * 4096  # the first piece is the header, which stays
    assert freed == set(range(first_free, shard.length, 4096))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=60),
    extents=st.lists(st.integers(1, 4), min_size=400, max_size=400),
    order=st.randoms(use_true_random=False),
)
def test_what_is_held_by_extents_is_not_counted_as_free(
    lengths: list[int], extents: list[int], order: random.Random
) -> None:
    """Wherever the extents of up to four blocks begin and end; in units of blocks here."""
    shard = mapped(*(length * 4096 - 32 for length in lengths))
    blocks = FreeableBlocks([shard], 4096, 4 * 4096)
    pieces = Units([shard], [1 << 30], 1 << 20).pieces
    order.shuffle(pieces)
    used = set(range(sum(lengths)))
    starts = list(itertools.takewhile(lambda at: at < sum(lengths), itertools.accumulate(extents)))
    kept = [set(range(*ends)) for ends in itertools.pairwise([0, *starts, sum(lengths)])]
    for piece in pieces:
        start, end = blocks.add(piece) or (0, 0)
        used -= set(range(start // 4096, end // 4096))
        free = sum(len(extent) for extent in kept if not extent & used)
        assert blocks.freed_length <= free * 4096


def test_on_btrfs_the_plan_says_what_extents_hold(source: Path, tmp_path: Path) -> None:
    def extra_length(folder: Path) -> int:
        plan = pack_in_place(folder, folder.parent / "pack", dry_run=True).in_place
        assert plan is not None
        return plan.extra_length

    with mounted("btrfs", tmp_path / "disk") as disk:
        shutil.copytree(source, disk / "source")
        more = extra_length(disk / "source") - extra_length(source)
    length = sum(path.stat().st_size for path in source.iterdir())
    assert length / 2 < more <= length


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(lengths=st.lists(st.integers(1, 400_000), min_size=1, max_size=12), of=st.integers(1, 4))
def test_units_are_all_of_the_files_and_none_is_too_long(lengths: list[int], of: int) -> None:
    shard, length = mapped(*lengths), of * units.CUT_ALIGNMENT
    file_length = sum(-(-length // 4096) * 4096 for length in lengths)
    cut = Units([shard], [file_length], length)
    assert [unit.number for unit in cut.units] == list(range(len(cut.units)))
    assert cut.units[0].start == 0
    assert cut.units[-1].end == file_length
    for before, after in itertools.pairwise(cut.units):
        assert before.end == after.start
    assert max(unit.end - unit.start for unit in cut.units) <= length + 4096
    for unit in cut.units:
        assert all(unit.start <= piece.offset < piece.end <= unit.end for piece in unit.pieces)
    assert sum(piece.length for unit in cut.units for piece in unit.pieces) == sum(lengths)
    needed = cut.space_needs(4096)
    assert needed.to_pack(0) >= cut.units[0].end
    assert needed.to_pack(len(cut.units)) == 0
    assert needed.to_restore(0) == 0


# The command


def test_the_command_asks_for_a_word_on_a_terminal_and_for_an_option_elsewhere(
    source: Path, tmp_path: Path, cli: Run
) -> None:
    before = contents(source)
    pack_model(source, tmp_path / "copy")
    target = tmp_path / "pack"
    packing = ("pack", source, "-o", target, "--in-place")
    run = cli(*packing, stdin=subprocess.DEVNULL)
    assert run.returncode == 2
    assert "--yes-delete-source" in run.stderr
    for word, code in (("yes\n", 2), ("delete\n", 0)):
        assert contents(source) == before
        with Terminal(*MOEPACK, *map(str, packing)) as terminal:
            terminal.type(word)
            terminal.until_end()
        assert terminal.process.returncode == code
    assert contents(target) == contents(tmp_path / "copy")
    restoring = ("restore", target, "-o", source, "--in-place")
    assert cli(*restoring, stdin=subprocess.DEVNULL).returncode == 2
    assert cli(*restoring, "--yes-delete-pack").returncode == 0
    assert contents(source) == before


def test_the_command_shows_the_plan_and_all_that_speaks_against_it(
    source: Path, tmp_path: Path, cli: Run
) -> None:
    os.link(shard(source), tmp_path / "other")
    shard(source).chmod(0o444)
    packing = ("pack", source, "-o", tmp_path / "pack", "--in-place")
    dry = cli(*packing, "--dry-run")
    assert dry.returncode == 2
    assert dry.stdout.count("refused") == 2
    run = cli(*packing, "--yes-delete-source")
    assert run.returncode == 2
    assert "hard links" in run.stderr
    assert "also: " in run.stderr
