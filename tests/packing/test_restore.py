"""Restore: the shards come back to the bit, or not at all."""

import hashlib
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MachineError, PackError, RequestError
from moepack.packing.in_place.unfinished import is_unfinished
from moepack.packing.pack_model import pack_model
from moepack.packing.restore import restore
from moepack.packing.shard_index import index_model
from moepack.storage.whole_files import partial_name
from tests.support import gguf_builder, odd_models
from tests.support.file_systems import mounted
from tests.support.gguf_builder import moe
from tests.support.interruptions import StopHereError
from tests.support.models import REAL_MODELS, contents, first_shard, flip, hotness_of, shards_of
from tests.support.packs import edit_shards, pieces, same_bytes

pytestmark = pytest.mark.long

LAYOUTS = ("layers", "hot-first", "natural")
MIB = 1 << 20


def source_of(model: str, folder: Path) -> list[Path]:
    """Return the shards of a real model or of an odd one."""
    if model in REAL_MODELS:
        return [Path(path) for path in shards_of(model)]
    return odd_models.write(model, folder / "source")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Build and pack a model of four shards, each longer than a run; read-only for all tests."""
    folder = tmp_path_factory.mktemp("big")
    built = gguf_builder.moe((0, 1, 2, 3), 32, ne=(512, 256))
    shards = gguf_builder.write_shards(gguf_builder.split(built, 5), folder / "source")
    pack_model(folder / "source", folder / "pack")
    return shards, folder / "pack"


@pytest.fixture
def packed(tmp_path: Path) -> tuple[list[Path], Path]:
    """Pack qwen3moe with the SHA-256 of its shards."""
    pack_model(first_shard("qwen3moe"), tmp_path / "pack", sha256=True)
    return [Path(path) for path in shards_of("qwen3moe")], tmp_path / "pack"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *zip([*REAL_MODELS, *odd_models.MODELS], itertools.cycle(LAYOUTS), strict=False),
        *(("gpt-oss", layout) for layout in LAYOUTS),
    ],
)
def test_shards_come_back_to_the_bit(model: str, layout: str, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    counts = {(2, 5): 9, (3, 1): 4} if model == "deepseek2" else {(0, 1): 3, (0, 3): 5}
    made = pack_model(shards[0], tmp_path / "pack", layout=layout, hotness=hotness_of(counts))
    assert made.is_whole
    done = restore(tmp_path / "pack", tmp_path / "restored", threads=3)
    assert same_bytes(shards, tmp_path / "restored")
    assert done.length == sum(path.stat().st_size for path in shards)
    assert [file.name for file in done.files] == [path.name for path in shards]
    assert (done.kept_length, done.sha256_count, done.digests.unknown_length) == (0, 0, 0)
    assert done.digests.compared_length == done.digests.known_length > 0


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("model", ["gpt-oss", *odd_models.MODELS])
def test_an_index_over_shards_copies_them(model: str, digests: bool, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    index_model(shards[0], tmp_path / "index", digests=digests)
    done = restore(tmp_path / "index", tmp_path / "restored").digests
    assert (done.unknown_length == 0) is digests
    assert done.compared_length == done.known_length
    assert same_bytes(shards, tmp_path / "restored")


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({"experts_only": True}, "the dense part"),
        ({"layers": "0"}, "the layers that were left out, found layers 0"),
        ({"layers": "1", "experts_only": True}, "the dense part, found layers 1"),
    ],
)
def test_a_pack_that_is_not_whole_says_what_it_lacks(
    options: dict[str, bool], lacks: str, tmp_path: Path
) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "pack", **options)  # type: ignore[arg-type]
    with pytest.raises(PackError, match="not a whole pack: it lacks") as raised:
        restore(tmp_path / "pack", tmp_path / "restored")
    assert str(raised.value).endswith(lacks)
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("model", ["mixtral", "padded"])
def test_a_flipped_bit_anywhere_is_named_and_gives_no_shard(model: str, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    pack_model(shards[0], tmp_path / "pack")
    files = contents(tmp_path / "pack")
    chosen = random.Random(5).sample(list(pieces(tmp_path / "pack")), 4)
    by_file = {path: (name, path, piece) for name, path, piece in pieces(tmp_path / "pack")}
    for shard, path, piece in [*chosen, *by_file.values()]:
        at = piece.input_offset + random.Random(piece.input_offset).randrange(piece.length)
        flip(path, at, 0x10)
        with pytest.raises(PackError) as raised:
            restore(tmp_path / "pack", tmp_path / "restored", threads=2)
        error = raised.value
        assert error.path == str(path)
        assert error.place == f"{piece.label} at byte {piece.input_offset:,}"
        assert error.problem == "the bytes do not have the digest in the index"
        (note,) = error.__notes__
        left = sorted(path.name for path in (tmp_path / "restored").glob("*.partial"))
        assert left
        assert all(name in note for name in left[:3])
        assert not (tmp_path / "restored" / shard).exists()
        for name in {p.name for p in shards} & set(os.listdir(tmp_path / "restored")):
            whole = next(p for p in shards if p.name == name)
            assert (tmp_path / "restored" / name).read_bytes() == whole.read_bytes()
        shutil.rmtree(tmp_path / "restored")
        path.write_bytes(files[path.name])
    restore(tmp_path / "pack", tmp_path / "restored")


def test_the_sha256_of_each_shard_is_compared(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = packed
    assert restore(pack, tmp_path / "restored").sha256_count == len(shards)
    wrong = hashlib.sha256(b"another").hexdigest()
    edit_shards(pack, lambda n, shard: shard._replace(sha256=wrong) if n == 2 else shard)
    with pytest.raises(PackError, match="does not have the SHA-256 of the source") as raised:
        restore(pack, tmp_path / "again", threads=1)
    assert (raised.value.expected, raised.value.found) == (
        wrong,
        hashlib.sha256(shards[2].read_bytes()).hexdigest(),
    )
    partial = f"{shards[2].name}.partial"
    assert raised.value.path == str(tmp_path / "again" / partial)
    assert partial in str(raised.value.hint)
    assert not (tmp_path / "again" / shards[2].name).exists()
    assert (tmp_path / "again" / partial).read_bytes() == shards[2].read_bytes()
    with pytest.raises(PackError, match="does not have the SHA-256 of the source"):
        restore(pack, tmp_path / "restored", resume=True)  # the shards that stay as well


@pytest.mark.parametrize("in_place", [False, True])
def test_the_sha256_of_each_header_is_compared(
    in_place: bool, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """Also where that of the shard is not known."""
    shards, pack = packed
    edit_shards(pack, lambda _, shard: shard._replace(sha256=None))
    wrong = hashlib.sha256(b"another").hexdigest()
    edit_shards(pack, lambda n, shard: shard._replace(header_sha256=wrong) if n == 2 else shard)
    (tmp_path / "restored").mkdir()
    with pytest.raises(PackError, match="the header of the restored shard does not") as raised:
        restore(pack, tmp_path / "restored", in_place=in_place, threads=1)
    assert raised.value.expected == wrong
    assert (tmp_path / "restored" / shards[2].name).exists() == in_place


@pytest.mark.parametrize("kind", ["link", "broken link"])
def test_a_link_is_in_the_way(kind: str, packed: tuple[list[Path], Path], tmp_path: Path) -> None:
    shards, pack = packed
    target = tmp_path / "restored"
    target.mkdir()
    place = target / shards[0].name
    (tmp_path / "victim").write_bytes(shards[0].read_bytes())
    place.symlink_to(tmp_path / ("victim" if kind == "link" else "nowhere"))
    for resume in (False, True):
        with pytest.raises(RequestError, match="exists already"):
            restore(pack, target, resume=resume)
    edit_shards(pack, lambda _, shard: shard._replace(sha256=None))
    restore(pack, target, force=True)
    assert same_bytes(shards, target)
    assert not place.is_symlink()
    assert (tmp_path / "victim").read_bytes() == shards[0].read_bytes()


@pytest.mark.parametrize("in_place", [False, True])
def test_where_shards_cannot_go_is_said_as_for_packs(
    in_place: bool, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="no such folder"):
        restore(packed[1], tmp_path / "no" / "shards", in_place=in_place)
    with pytest.raises(RequestError, match="exists, and is not a directory"):
        restore(packed[1], tmp_path / "file", in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_no_file_of_another_pack_is_written_over(
    in_place: bool, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """Names of shards are the source's, and may be those of any file."""
    shards, pack = packed
    other = tmp_path / "other"
    pack_model(first_shard("qwen3moe"), other)
    (other / "dense.bin").rename(other / shards[0].name)
    before = contents(other)
    problem = (
        "a file of a pack is never overwritten" if in_place else "a pack, not a folder for shards"
    )
    for folder in (other, *([] if in_place else [pack])):
        with pytest.raises(RequestError, match=problem):
            restore(pack, folder, in_place=in_place, force=True)
    assert contents(other) == before
    assert not is_unfinished(pack)


def test_an_interrupted_run_is_continued_only_when_asked(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = packed
    target = tmp_path / "restored"
    target.mkdir()
    left = target / f"{shards[1].name}.partial"
    left.write_bytes(shards[1].read_bytes()[:5000])
    with pytest.raises(RequestError, match="an interrupted run left this file") as raised:
        restore(pack, target)
    assert "`resume=True`" in str(raised.value.hint)
    assert left.stat().st_size == 5000
    assert restore(pack, target, force=True).kept_length == 0
    assert same_bytes(shards, target)


def test_resuming_keeps_what_is_right_and_mends_the_rest(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = big
    restore(pack, tmp_path)
    finished = tmp_path / shards[0].name
    before = finished.stat()
    partial = tmp_path / f"{shards[1].name}.partial"
    (tmp_path / shards[1].name).rename(partial)
    flip(partial, partial.stat().st_size // 2)
    (tmp_path / shards[2].name).unlink()
    lengths = [path.stat().st_size for path in shards]
    done = restore(pack, tmp_path, resume=True)
    assert same_bytes(shards, tmp_path)
    assert (finished.stat().st_ino, finished.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    kept = done.kept_length - lengths[0] - sum(lengths[3:])
    assert 0 < kept < lengths[1]


def test_a_finished_shard_that_was_damaged_is_not_taken_for_whole(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = big
    restore(pack, tmp_path)
    flip(tmp_path / shards[1].name, shards[1].stat().st_size - 1)
    damaged = (tmp_path / shards[1].name).read_bytes()
    with pytest.raises(RequestError, match="is not the file that would be written"):
        restore(pack, tmp_path, resume=True)
    assert (tmp_path / shards[1].name).read_bytes() == damaged
    done = restore(pack, tmp_path, resume=True, force=True)
    assert done.kept_length == done.length - len(damaged)
    assert same_bytes(shards, tmp_path)


def test_a_full_disk_is_seen_before_anything_is_written(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path / "disk", 20 * MIB) as disk:
        with pytest.raises(MachineError, match="not enough space"):
            restore(big[1], disk / "restored")
        assert list((disk / "restored").iterdir()) == []


@pytest.mark.parametrize("error", [StopHereError, KeyboardInterrupt])
def test_an_interruption_ends_all_threads_and_can_be_continued(
    error: type[BaseException], big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    done = 0

    def progress(length: int, total: int) -> None:
        nonlocal done
        done += length
        if done > total // 2:
            raise error

    with pytest.raises(error):
        restore(big[1], tmp_path, progress=progress)
    assert not same_bytes(big[0], tmp_path)
    assert restore(big[1], tmp_path, resume=True).kept_length > 0
    assert same_bytes(big[0], tmp_path)


def test_a_file_that_is_being_written_is_not_taken_over(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """Else the beginning of another run would get the name of the file that this one wrote."""
    options: list[dict[str, Any]] = [{"resume": True}, {"force": True}]

    def progress(length: int, total: int) -> None:
        if options:
            with pytest.raises(RequestError, match="another moepack is writing here"):
                restore(big[1], tmp_path, **options.pop())

    restore(big[1], tmp_path, progress=progress, threads=1)
    assert not options
    assert same_bytes(big[0], tmp_path)


def test_progress_ends_at_its_total(big: tuple[list[Path], Path], tmp_path: Path) -> None:
    choices: tuple[dict[str, Any], ...] = ({}, {"resume": True}, {"force": True})
    for options in choices:
        steps: list[tuple[int, int]] = []
        add = steps.append
        done = restore(big[1], tmp_path, progress=lambda *step, add=add: add(step), **options)
        assert {total for _, total in steps} == {done.length}
        assert sum(length for length, _ in steps) == done.length
    assert done.kept_length == 0


def test_names_that_are_each_others_partial_are_refused(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    edit_shards(packed[1], lambda n, shard: shard._replace(name="x" + ".partial" * n))
    with pytest.raises(PackError, match="two files would get the same name"):
        restore(packed[1], tmp_path / "restored")
    assert list((tmp_path / "restored").iterdir()) == []


def test_a_name_as_long_as_a_name_can_be_is_restored(tmp_path: Path) -> None:
    name = "ä" * 125 + ".gguf"
    (tmp_path / "source").mkdir()
    path = moe((0,)).write(tmp_path / "source" / name)
    assert len(os.fsencode(name)) == 255
    pack_model(path, tmp_path / "pack")
    restore(tmp_path / "pack", tmp_path / "restored")
    assert same_bytes([path], tmp_path / "restored")
    assert len(os.fsencode(partial_name(name))) <= 255


def test_a_name_that_no_manifest_holds_is_refused_before_packing(tmp_path: Path) -> None:
    path = moe((0,)).write(tmp_path / os.fsdecode(b"\xff" * 80 + b".gguf"))
    with pytest.raises(Exception, match="the name is too long"):
        pack_model(path, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_a_name_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    path = moe((0,)).write(tmp_path / os.fsdecode(b"m\xff.gguf"))
    pack_model(path, tmp_path / "pack")
    restore(tmp_path / "pack", tmp_path / "restored")
    assert contents(tmp_path / "restored") == {r"m\udcff.gguf": path.read_bytes()}
