"""Restore: the shards come back to the bit, or not at all."""

import hashlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.errors import MachineError, PackError, RequestError
from moepack.packing.pack_model import pack_model
from moepack.packing.restore import restore
from moepack.packing.shard_index import index_model
from moepack.packing.unfinished import is_unfinished
from moepack.storage.whole_files import partial_name
from tests.support import gguf_builder, odd_models
from tests.support.gguf_builder import moe
from tests.support.machine_faults import Room
from tests.support.models import REAL_MODELS, contents, first_shard, flip, hotness_of, shards_of
from tests.support.packs import edit_shards, pieces, same_bytes

pytestmark = pytest.mark.long

LAYOUTS = ("layers", "hot-first", "natural")
COMMAND = (sys.executable, "-m", "moepack", "restore")
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
    (folder / "source").mkdir()
    built = gguf_builder.moe((0, 1, 2, 3), 32, ne=(512, 256))
    shards = gguf_builder.write_shards(gguf_builder.split(built, 5), folder / "source")
    pack_model(folder / "source", folder / "pack")
    return shards, folder / "pack"


@pytest.fixture
def packed(tmp_path: Path) -> tuple[list[Path], Path]:
    """Pack qwen3moe with the SHA-256 of its shards."""
    pack_model(first_shard("qwen3moe"), tmp_path / "pack", sha256=True)
    return [Path(path) for path in shards_of("qwen3moe")], tmp_path / "pack"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [*REAL_MODELS, *odd_models.MODELS])
def test_shards_come_back_to_the_bit(model: str, layout: str, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    counts = {(2, 5): 9, (3, 1): 4} if model == "deepseek2" else {(0, 1): 3, (0, 3): 5}
    made = pack_model(shards[0], tmp_path / "pack", layout=layout, hotness=hotness_of(counts))
    assert made.is_whole
    done = restore(tmp_path / "pack", tmp_path / "restored", threads=3)
    assert same_bytes(shards, tmp_path / "restored")
    assert done.length == sum(path.stat().st_size for path in shards)
    assert [file.name for file in done.files] == [path.name for path in shards]
    assert (done.kept_length, done.sha256_count, done.has_digests) == (0, 0, True)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("model", ["gpt-oss", *odd_models.MODELS])
def test_an_index_over_shards_copies_them(model: str, digests: bool, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    index_model(shards[0], tmp_path / "index", digests=digests)
    assert restore(tmp_path / "index", tmp_path / "restored").has_digests is digests
    assert same_bytes(shards, tmp_path / "restored")


def test_the_models_are_as_odd_as_they_say(tmp_path: Path) -> None:
    def labels(model: str) -> list[str]:
        shards = odd_models.write(model, tmp_path / model)
        pack_model(shards[0], tmp_path / f"{model}.pack")
        return [piece.label for _, _, piece in pieces(tmp_path / f"{model}.pack")]

    assert sum(label.startswith("padding") for label in labels("padded")) >= 5
    assert labels("first without tensors").count("header") == 3
    assert "tensor 🦙" + "🦙" * 14 in labels("odd names")
    assert "tensor nothing.last" not in labels("empty tensors")
    with moepack.open(tmp_path / "empty tensors.pack") as pack:
        assert sum(not tensor.length for tensor in pack.dense()) == 4
    shards = odd_models.write("long header", tmp_path / "long header")
    assert shards[0].stat().st_size > MIB


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


@pytest.mark.parametrize("model", ["mixtral", "padded", "legacy"])
def test_a_flipped_bit_anywhere_is_named_and_gives_no_shard(model: str, tmp_path: Path) -> None:
    shards = source_of(model, tmp_path)
    pack_model(shards[0], tmp_path / "pack")
    held = contents(tmp_path / "pack")
    chosen = random.Random(5).sample(list(pieces(tmp_path / "pack")), 12)
    by_file = {path: (name, path, piece) for name, path, piece in pieces(tmp_path / "pack")}
    for shard, path, piece in [*chosen, *by_file.values()]:
        at = piece.offset + random.Random(piece.offset).randrange(piece.length)
        flip(path, at, 0x10)
        with pytest.raises(PackError) as raised:
            restore(tmp_path / "pack", tmp_path / "restored", threads=2)
        error = raised.value
        assert error.path == str(path)
        assert error.place == f"{piece.label} at byte {piece.offset:,}"
        assert error.problem == "the bytes do not have the digest in the index"
        assert not (tmp_path / "restored" / shard).exists()
        for name in {p.name for p in shards} & set(os.listdir(tmp_path / "restored")):
            whole = next(p for p in shards if p.name == name)
            assert (tmp_path / "restored" / name).read_bytes() == whole.read_bytes()
        shutil.rmtree(tmp_path / "restored")
        path.write_bytes(held[path.name])
    restore(tmp_path / "pack", tmp_path / "restored")


def test_a_flipped_bit_in_padding_of_the_pack_harms_no_shard(tmp_path: Path) -> None:
    shards = [Path(path) for path in shards_of("granite")]
    pack_model(shards[0], tmp_path / "pack")
    ends = sorted(
        (piece.offset, piece.offset + piece.length)
        for _, path, piece in pieces(tmp_path / "pack")
        if path.name == "dense.bin"
    )
    end = next(end for (_, end), (start, _) in itertools.pairwise(ends) if end < start)
    flip(tmp_path / "pack" / "dense.bin", end)
    restore(tmp_path / "pack", tmp_path / "restored")
    assert same_bytes(shards, tmp_path / "restored")


@pytest.mark.parametrize("fault", ["missing", "cut", "folder"])
def test_a_data_file_that_is_gone_is_the_packs_fault(
    fault: str, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    path = packed[1] / "dense.bin"
    if fault == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    if fault == "folder":
        path.mkdir()
    with pytest.raises(PackError, match="missing|shorter|not a regular file") as raised:
        restore(packed[1], tmp_path / "restored")
    assert raised.value.path == str(path)


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


def test_the_sha256_is_compared_of_shards_that_stay_too(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    restore(packed[1], tmp_path / "restored")
    edit_shards(packed[1], lambda _, shard: shard._replace(sha256="0" * 64))
    with pytest.raises(PackError, match="does not have the SHA-256 of the source"):
        restore(packed[1], tmp_path / "restored", resume=True)


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


def test_existing_shards_are_left_alone_unless_forced(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = packed
    target = tmp_path / "restored"
    target.mkdir()
    (target / shards[4].name).write_bytes(b"mine")
    (target / "other.txt").write_bytes(b"mine too")
    for resume in (False, True):
        with pytest.raises(RequestError, match="exists already") as raised:
            restore(pack, target, resume=resume)
        assert raised.value.path == str(target / shards[4].name)
        assert contents(target) == {shards[4].name: b"mine", "other.txt": b"mine too"}
    restore(pack, target, force=True)
    (target / "other.txt").unlink()
    assert same_bytes(shards, target)


@pytest.mark.parametrize("kind", ["link", "broken link", "folder"])
def test_what_is_no_file_is_in_the_way(
    kind: str, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = packed
    target = tmp_path / "restored"
    target.mkdir()
    place = target / shards[0].name
    (tmp_path / "victim").write_bytes(shards[0].read_bytes())
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / ("victim" if kind == "link" else "nowhere"))
    for resume in (False, True):
        with pytest.raises(RequestError, match="exists already|a folder has this name"):
            restore(pack, target, resume=resume)
    if kind == "folder":
        with pytest.raises(RequestError, match="a folder has this name"):
            restore(pack, target, force=True)
        return
    edit_shards(pack, lambda _, shard: shard._replace(sha256=None))
    restore(pack, target, force=True)
    assert same_bytes(shards, target)
    assert not place.is_symlink()
    assert (tmp_path / "victim").read_bytes() == shards[0].read_bytes()


def test_a_pack_is_not_written_over_by_what_is_restored_from_it(tmp_path: Path) -> None:
    shards = odd_models.write("legacy", tmp_path / "source")
    index_model(shards[0], tmp_path / "index")
    with pytest.raises(RequestError, match="belongs to what is read"):
        restore(tmp_path / "index", tmp_path / "source", force=True)
    assert set(os.listdir(tmp_path / "source")) == {path.name for path in shards}


@pytest.mark.parametrize("in_place", [False, True])
def test_where_shards_cannot_go_is_said_as_for_packs(
    in_place: bool, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="no such folder"):
        restore(packed[1], tmp_path / "no" / "shards", in_place=in_place)
    with pytest.raises(RequestError, match="exists, and is no directory"):
        restore(packed[1], tmp_path / "file", in_place=in_place)


def test_what_a_damaged_pack_leaves_is_named(
    packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    flip(packed[1] / "experts-00001.bin", 40)
    with pytest.raises(PackError) as raised:
        restore(packed[1], tmp_path / "restored", threads=1)
    left = sorted(path.name for path in (tmp_path / "restored").glob("*.partial"))
    (note,) = raised.value.__notes__
    assert left
    assert all(name in note for name in left[:3])


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
    problem = "a file of a pack is never written" if in_place else "a pack, not a folder for shards"
    with pytest.raises(RequestError, match=problem):
        restore(pack, other, in_place=in_place, force=True)
    assert contents(other) == before
    assert not is_unfinished(pack)


def test_shards_are_not_restored_into_the_pack_itself(packed: tuple[list[Path], Path]) -> None:
    _, pack = packed
    before = contents(pack)
    with pytest.raises(RequestError, match="a pack, not a folder for shards"):
        restore(pack, pack)
    assert contents(pack) == before


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


def length_in(folder: Path) -> int:
    """Return the bytes of all files in a folder, which come and go meanwhile; 0 without it."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except FileNotFoundError:
        return 0


def test_a_run_that_is_killed_again_and_again_ends_right(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """At moments that are shares of the bytes written, however fast the machine is."""
    shards, pack = big
    names = {name for path in shards for name in (path.name, f"{path.name}.partial")}
    length = sum(path.stat().st_size for path in shards)
    target = tmp_path / "restored"
    kills = 0
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen(
            [*COMMAND, pack, "-o", target, "--resume"], stdout=subprocess.DEVNULL
        )
        while process.poll() is None and length_in(target) <= share * length:
            time.sleep(0.0002)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        held = set(os.listdir(target)) if target.exists() else set()
        assert held <= names
        for path in shards:
            if path.name in held:
                assert (target / path.name).read_bytes() == path.read_bytes()
    assert kills
    subprocess.run([*COMMAND, pack, "-o", target, "--resume"], check=True, capture_output=True)
    assert same_bytes(shards, target)


def test_a_full_disk_is_seen_before_anything_is_written(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    with Room() as room:
        (tmp_path / "disk").mkdir()
        disk = room.mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=20m", "none")
        with pytest.raises(MachineError, match="not enough space"):
            restore(big[1], disk / "restored")
        assert list((disk / "restored").iterdir()) == []


def test_a_disk_that_is_full_midway_leaves_what_can_be_continued(
    big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    shards, pack = big

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, 10 * MIB))

    target = tmp_path / "restored"
    run = subprocess.run(
        [*COMMAND, pack, "-o", target, "--threads", "1"],
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 6, run.stderr
    assert "File too large" in run.stderr
    assert "--resume" in run.stderr
    assert any(name.endswith(".partial") for name in os.listdir(target))
    assert restore(pack, target, resume=True).kept_length > 0
    assert same_bytes(shards, target)


class StopHereError(Exception):
    """Raised by a test's progress callback."""


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


@pytest.mark.parametrize(("resume", "force"), [(True, False), (False, True)])
def test_a_file_that_is_being_written_is_not_taken_over(
    resume: bool, force: bool, big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    """Else what another run has begun would get the name of what this one has written."""
    problems = list[str]()

    def progress(length: int, total: int) -> None:
        if not problems:
            with pytest.raises(RequestError, match="another moepack is writing here") as found:
                restore(big[1], tmp_path, resume=resume, force=force)
            problems.append(str(found.value))

    restore(big[1], tmp_path, progress=progress, threads=1)
    assert problems
    assert same_bytes(big[0], tmp_path)


def test_progress_ends_at_its_total(big: tuple[list[Path], Path], tmp_path: Path) -> None:
    for options in ({}, {"resume": True}, {"force": True}):
        steps: list[tuple[int, int]] = []
        add = steps.append
        done = restore(big[1], tmp_path, progress=lambda *step, add=add: add(step), **options)
        assert {total for _, total in steps} == {done.length}
        assert sum(length for length, _ in steps) == done.length
    assert done.kept_length == 0


HOSTILE_NAMES: dict[str, Callable[[int], str]] = {
    "upwards": lambda n: f"../x{n}",
    "in a folder": lambda n: f"a/b{n}",
    "empty": lambda n: "" if n == 2 else f"x{n}",
    "nul": lambda n: f"x{n}\0.gguf",
    "folder itself": lambda n: "." if n == 0 else f"x{n}",
    "folder above": lambda n: ".." if n == 0 else f"x{n}",
    "300 bytes": lambda n: f"{n}" * 300,
    "300 bytes of letters of two": lambda n: f"{n}" + "ä" * 150,
    "half a surrogate": lambda n: f"\udc80{n}",
    "twice": lambda n: f"x{n % 5}",
    "each other's partial": lambda n: "x" + ".partial" * n,
}


@pytest.mark.parametrize("kind", HOSTILE_NAMES)
def test_hostile_names_of_shards_are_refused(
    kind: str, packed: tuple[list[Path], Path], tmp_path: Path
) -> None:
    name_of = HOSTILE_NAMES[kind]
    edit_shards(packed[1], lambda n, shard: shard._replace(name=name_of(n)))
    (tmp_path / "deep").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PackError):
        restore(packed[1], tmp_path / "deep" / "restored")
    added = set(tmp_path.rglob("*")) - set(before)
    assert added <= {tmp_path / "deep" / "restored"}


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
    with pytest.raises(Exception, match="too long a name"):
        pack_model(path, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_a_name_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    path = moe((0,)).write(tmp_path / os.fsdecode(b"m\xff.gguf"))
    pack_model(path, tmp_path / "pack")
    restore(tmp_path / "pack", tmp_path / "restored")
    assert contents(tmp_path / "restored") == {r"m\udcff.gguf": path.read_bytes()}


@pytest.mark.parametrize("threads", [1, 16])
def test_any_number_of_threads_gives_the_same(
    threads: int, big: tuple[list[Path], Path], tmp_path: Path
) -> None:
    before = contents(big[1])
    restore(big[1], tmp_path / "restored", threads=threads)
    assert same_bytes(big[0], tmp_path / "restored")
    assert contents(big[1]) == before


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, packs: dict[str, Path]) -> None:
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file", tmp_path / "no" / "such" / "folder"):
        with pytest.raises((MachineError, RequestError)) as raised:
            restore(packs["qwen3moe"], target)
        assert str(tmp_path) in str(raised.value.path)
