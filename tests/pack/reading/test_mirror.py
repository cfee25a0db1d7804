"""Reads from a mirror, sound or damaged."""

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from moepack.common.errors import MirrorWarning, PackError
from moepack.pack.reading import copies
from moepack.pack.reading.copies import CopiedFile, CopyRecord, CopyRequest
from moepack.storage.extents import RangeSet
from tests.support.faulty_backend import Fault, FaultyBackend, make, require
from tests.support.gguf_builder import moe
from tests.support.models import first_shard, flip, keys_of, on_disk, reads_right
from tests.support.packs import mirror
from tests.support.ways import WAYS, Reading

pytestmark = pytest.mark.long

FILES = ("experts-00000.bin", "experts-00001.bin")


@pytest.fixture
def past_cache(packs: dict[str, Path]) -> str:
    """Name the backend that reads past the page cache, where it works."""
    return require("direct", packs["qwen3moe"])


@pytest.fixture
def mirrored(pack_copy: Path) -> Path:
    """Give a pack that has a mirror, in which all experts are."""
    mirror(pack_copy)
    return pack_copy


def folder_of(pack: Path) -> Path:
    """Return the folder of a pack's mirror."""
    return Path(os.readlink(pack / ".mirror"))


# What it gives


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Mirror a pack and an index over shards; return each with the pack."""
    folder = tmp_path_factory.mktemp("mirrored")
    model, plain = first_shard("gpt-oss"), folder / "plain" / "pack"
    index = folder / "index" / "pack"
    for path in (plain, index):
        path.parent.mkdir()
    moepack.pack_model(model, plain)
    moepack.index_model(model, index, digests=True)
    for path in (plain, index):
        mirror(path)
    return [(plain, plain), (index, plain)]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_reads_from_both_places_until_the_mirror_fails(
    way: str, kinds: list[tuple[Path, Path]], past_cache: str
) -> None:
    for path, plain_path in kinds:
        with moepack.open(path) as pack, moepack.open(plain_path) as plain:
            keys = keys_of(pack)[:6] * 3
            sound = Reading(pack, keys, ("up", "down"), options={"backend": past_cache})
            WAYS[way](sound)
            spoiled = Reading(pack, keys, ("up", "down"), options={"backend": past_cache})
            with _spoiled(folder_of(path)), pytest.warns(MirrorWarning):
                WAYS[way](spoiled)
            for reading in (sound, spoiled):
                assert reading.errors == []
                for number, contents in reading.experts.items():
                    for part in ("up", "down"):
                        assert contents[part] == on_disk(plain.locate(*keys[number], part))
                assert reading.statistics is not None
                assert reading.statistics.error_count == 0
            assert sound.statistics is not None
            assert sound.statistics.mirror is not None
            assert 0 < sound.statistics.mirror.read_length < sound.statistics.read_length
            assert sound.statistics.mirror.error_count == 0


@contextlib.contextmanager
def _spoiled(folder: Path) -> Iterator[None]:
    """Flip a bit of each byte in a mirror for a while."""
    _flipped(folder)
    yield
    _flipped(folder)


@pytest.mark.parametrize("slow", ["pack", "mirror"])
def test_a_slow_drive_is_asked_for_little(slow: str, mirrored: Path, past_cache: str) -> None:
    folder = mirrored if slow == "pack" else folder_of(mirrored)
    backend = FaultyBackend(
        make(past_cache), *(Fault(path=folder / name, delay=0.03) for name in FILES)
    )
    with moepack.open(mirrored) as pack, pack.reader(backend=backend, depth=4) as reader:
        for _ in range(3):
            for key in keys_of(pack):  # by turns, if bytes in flight alone counted
                list(reader.read_many([key, key], in_order=False))
        usage = reader.statistics
    assert usage.mirror is not None
    count = (
        usage.mirror.read_count if slow == "mirror" else usage.read_count - usage.mirror.read_count
    )
    assert 0 < count < usage.read_count / 4


def test_what_is_not_mirrored_comes_from_the_pack(pack_copy: Path, past_cache: str) -> None:
    """As do dense tensors."""
    mirror(pack_copy, hottest=200_000)
    backend = FaultyBackend(make(past_cache))
    with moepack.open(pack_copy) as pack, pack.reader(backend=backend) as reader:
        hottest = [pack.locate(*key) for key in pack.hottest(200_000)]
        reads_right(pack, reader, rounds=3)
        assert reader.read_dense(pack.dense()[0].name)
    folder = folder_of(pack_copy)
    copies = {read[:2] for read in backend.begun if read.path.parent == folder}
    assert copies
    assert copies <= {(folder / where.path.name, where.offset) for where in hottest}


@pytest.mark.parametrize(("name", "mirror"), [("buffered", True), ("direct", False)])
def test_through_the_page_cache_or_if_asked_the_pack_alone_is_read(
    mirrored: Path, name: str, mirror: bool
) -> None:
    """Else the cache would hold both copies."""
    backend = FaultyBackend(make(require(name, mirrored)))
    with moepack.open(mirrored) as pack, pack.reader(backend=backend, mirror=mirror) as reader:
        reads_right(pack, reader)
        assert reader.mirror is None
        assert reader.statistics.mirror is None
    assert {read.path.parent for read in backend.begun} == {mirrored}


# What is noticed


def problem_of(pack: Path) -> str | None:
    """Read all of a pack, without its mirror if that has a problem; return the problem."""
    with moepack.open(pack) as opened:
        assert opened.mirror is not None
        problem = opened.mirror.problem
        if problem is not None:
            with pytest.warns(MirrorWarning, match="this mirror is not read"):
                reader = opened.reader()
            with reader:
                assert reader.mirror is None
                reads_right(opened, reader)
    return problem


def test_a_mirror_of_a_pack_that_was_made_anew_is_noticed(tmp_path: Path) -> None:
    """And of one whose ranks are new it is not: no blob was moved."""
    pack = tmp_path / "pack"
    model = moe((0, 1), 4)
    moepack.pack_model(model.write(tmp_path / "a.gguf"), pack)
    folder = mirror(pack)
    assert problem_of(pack) is None
    hotness = tmp_path / "hotness.csv"
    hotness.write_text("layer,expert,count\n0,2,7\n")
    assert moepack.rank_pack(pack, hotness).is_changed
    assert problem_of(pack) is None
    shutil.rmtree(pack)
    for tensor in model.tensors:
        tensor.data = bytes(len(tensor.data))
    moepack.pack_model(model.write(tmp_path / "b.gguf"), pack)
    (pack / ".mirror").symlink_to(folder)
    assert "of another pack" in str(problem_of(pack))


def test_a_record_that_is_damaged_or_gone_is_noticed(mirrored: Path) -> None:
    """Each byte of one is tried where packs are pulled, which have the same."""
    path = folder_of(mirrored) / "mirror.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in str(problem_of(mirrored))
    path.unlink()
    path.mkdir()
    assert "cannot be read" in str(problem_of(mirrored))
    shutil.rmtree(folder_of(mirrored))
    assert "not there" in str(problem_of(mirrored))


def test_a_record_is_read_as_it_was_written() -> None:
    """Wherever the pack is: a path may be any bytes."""
    files = {"a.bin": CopiedFile(5, ((0, 4), (9, 1 << 40))), "b2.bin": CopiedFile(0, ())}
    for origin in ("/packs/a", "s3://b/a b.moepack", os.fsdecode(b"/\xff \n\xc3\xa4")):
        written = CopyRecord(origin, (1 << 64) - 1, CopyRequest(False, (0, 99), 1 << 60), files)
        assert copies.decode(copies.encode(written), Path("m")) == written


def test_ranges_that_touch_or_fall_are_no_record() -> None:
    everything = CopyRequest(is_all=True)
    for name, ranges in (
        ("a.bin", [(5, 5)]),
        ("a.bin", [(0, 4), (4, 9)]),
        ("a.bin", [(9, 12), (1, 3)]),
        ("a.bin", [(-1, 3)]),
        ("../a", [(0, 1)]),
    ):
        record = CopyRecord("p", 1, everything, {name: CopiedFile(0, ranges)})
        data = copies.encode(record)
        with pytest.raises(PackError):
            copies.decode(data, Path("m"))


@given(st.lists(st.integers(0, 60), unique=True).map(sorted), st.integers(0, 60), st.integers(1, 9))
def test_a_range_is_covered_if_all_of_its_bytes_are(
    edges: list[int], start: int, length: int
) -> None:
    edges = edges[: len(edges) // 2 * 2]
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    covered = {byte for first, end in ranges for byte in range(first, end)}
    is_covered = covered.issuperset(range(start, start + length))
    assert RangeSet(ranges).covers(start, start + length) == is_covered


Damage = Callable[[Path], list[Fault]]


def _flipped(folder: Path) -> list[Fault]:
    flipped = bytes(byte ^ 1 for byte in range(256))
    for path in folder.iterdir():
        if path.name != "mirror.json":
            path.write_bytes(path.read_bytes().translate(flipped))
    return []


def _removed(folder: Path) -> list[Fault]:
    for name in FILES:
        (folder / name).unlink()
    return []


def _failing(folder: Path) -> list[Fault]:
    return [Fault(path=folder / name, code=errno.EIO) for name in FILES]


DAMAGE: dict[str, Damage] = {"flipped": _flipped, "removed": _removed, "EIO": _failing}


@pytest.mark.parametrize("check", ["always", "first"])
@pytest.mark.parametrize("what", DAMAGE)
def test_the_pack_serves_what_the_mirror_does_not(
    mirrored: Path, past_cache: str, what: str, check: str
) -> None:
    """It is warned of once, it is no error, and the mirror is not read again."""
    backend = FaultyBackend(make(past_cache), *DAMAGE[what](folder_of(mirrored)))
    with moepack.open(mirrored) as pack, pack.reader(backend=backend, check=check) as reader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reads_right(pack, reader, rounds=2)
        (warning,) = caught
        assert isinstance(warning.message, MirrorWarning)
        assert str(folder_of(mirrored)) in str(warning.message)
        assert reader.mirror is None
        statistics = reader.statistics
        assert statistics.error_count == 0
        assert statistics.mirror is not None
        assert 1 <= statistics.mirror.error_count <= 32
        assert statistics.mirror.error_count == statistics.mirror.read_count
        backend.begun.clear()
        reads_right(pack, reader, rounds=2)
        assert {read.path.parent for read in backend.begun} == {mirrored}


def test_each_place_is_checked_for_itself_the_first_time(mirrored: Path, past_cache: str) -> None:
    """A part that was right in the pack is not taken for right in the mirror."""
    with moepack.open(mirrored) as pack:
        backend = FaultyBackend(make(past_cache))
        with pack.reader(backend=backend, check="first") as reader:
            use = reader._in_flight.second
            assert use is not None
            use.takes = lambda *_: False  # type: ignore[method-assign]
            reads_right(pack, reader)
            use.takes = lambda *_: True  # type: ignore[method-assign]
            _flipped(folder_of(mirrored))
            with pytest.warns(MirrorWarning):
                reads_right(pack, reader)


def test_damage_in_both_places_is_the_pack_s(mirrored: Path, past_cache: str) -> None:
    _flipped(folder_of(mirrored))
    with moepack.open(mirrored) as pack:
        where = pack.locate(0, 4)
        flip(where.path, where.offset + 50)
        with (
            pack.reader(backend=past_cache) as reader,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", MirrorWarning)
            for _ in range(4):
                with pytest.raises(PackError, match="do not have the digest") as caught:
                    reader.read(0, 4)
                assert caught.value.path == str(where.path)
