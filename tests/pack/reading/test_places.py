"""The promises of an open pack, the same wherever it lies."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack import ExpertCache
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.common.shape import ExpertKey
from moepack.pack.reading.pack import Pack
from moepack.storage.remote.stores import forget_stores
from tests.support.children import in_threads
from tests.support.models import keys_of, on_disk
from tests.support.places import PLACES, Edit, Place, placed
from tests.support.ways import IN_ORDER, WAYS, Reading

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::moepack.MirrorWarning")]


@pytest.fixture(scope="module", params=PLACES)
def sound(
    request: pytest.FixtureRequest, hot_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Lay a pack in each place, for tests that change nothing."""
    with placed(request.param, hot_pack, tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.fixture
def place(sound: Place) -> Iterator[Place]:
    """Give a place to a test that damages the pack, and mend it afterwards."""
    yield sound
    while sound.undo:
        sound.undo.pop()()
    forget_stores()


@pytest.fixture
def plain(hot_pack: Path) -> Iterator[Pack]:
    """Open the pack as it lies in a folder that nothing changes."""
    with moepack.open(hot_pack) as pack:
        yield pack


def test_it_says_of_itself_what_the_pack_says(sound: Place, plain: Pack) -> None:
    with moepack.open(sound.address) as pack:
        assert (pack.layers, pack.shape) == (plain.layers, plain.shape)
        assert [one[:4] for one in pack.dense()] == [one[:4] for one in plain.dense()]
        for layer, expert in keys_of(plain):
            assert pack.parts(layer) == plain.parts(layer)
            for kind in pack.parts(layer):
                ours, theirs = (one.locate(layer, expert, kind.name) for one in (pack, plain))
                assert (ours.part, ours.length, ours.digest) == (
                    theirs.part,
                    theirs.length,
                    theirs.digest,
                )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_reads_the_bytes_that_were_packed(way: str, sound: Place, plain: Pack) -> None:
    with moepack.open(sound.address) as pack:
        for parts in (None, ("up", "down")):
            reading = Reading(pack, keys_of(plain)[::6], parts, options=sound.options)
            WAYS[way](reading)
            assert reading.errors == []
            assert sorted(reading.experts) == list(range(len(reading.keys)))
            for number, found in reading.experts.items():
                for part in found.keys() - {""}:
                    assert found[part] == on_disk(plain.locate(*reading.keys[number], part))
            if way in IN_ORDER:
                assert reading.order == sorted(reading.order)
            assert reading.statistics is not None
            assert reading.statistics.error_count == 0


def test_dense_tensors_are_those_of_the_pack(sound: Place, plain: Pack) -> None:
    with moepack.open(sound.address) as pack, pack.reader(**sound.options) as reader:
        for tensor in plain.dense():
            assert reader.read_dense(tensor.name) == on_disk(tensor)  # type: ignore[arg-type]


def test_values_are_those_of_the_pack_or_are_refused_by_name(sound: Place, plain: Pack) -> None:
    with moepack.open(sound.address) as pack:
        for layer, expert in keys_of(plain)[::5]:
            if sound.is_remote or not pack.is_local(layer, expert):
                with pytest.raises(RequestError, match="store|elsewhere|not here"):
                    pack.tensor(layer, expert, "up")
            else:
                values = pack.tensor(layer, expert, "up", dequantize=True)
                assert np.array_equal(values, plain.tensor(layer, expert, "up", dequantize=True))


def test_verification_finds_nothing(sound: Place) -> None:
    report = moepack.verify(sound.address)
    assert report.findings == ()
    assert report.passed is not False  # of a part that is unknown


def test_many_threads_and_readers_get_their_own_bytes(sound: Place, plain: Pack) -> None:
    keys = keys_of(plain)
    expected = {key: on_disk(plain.locate(*key, "up")) for key in keys}
    with moepack.open(sound.address) as pack, pack.reader(**sound.options) as shared:

        def work(seed: int) -> None:
            some = random.Random(seed).sample(keys, 10)
            with pack.reader(**sound.options) as own:
                for reader in (own, shared):
                    for one in reader.read_many(some, parts=("up",), in_order=seed % 2 == 0):
                        assert one.part("up") == expected[some[one.number]]
                    assert reader.read(*some[0], "up") == expected[some[0]]

        in_threads(4, work)
        assert shared.statistics.in_flight_count == 0


def is_refused_by_caches(place: Place) -> bool:
    """Return whether a cache for engines refuses the place: it says why, and what helps."""
    with moepack.open(place.address) as pack:
        is_partial = pack.partial is not None
    if not (place.is_remote or is_partial):
        return False
    problem = "the pack is in a store" if place.is_remote else "a part of the pack is not here"
    with pytest.raises(RequestError, match=problem) as refused:
        ExpertCache(place.address, "1GiB")
    assert "moepack pull" in str(refused.value.hint)
    return True


def is_right(cache: ExpertCache, plain: Pack, layer: int, expert: int) -> bool:
    (found,) = cache.use(layer, [expert])
    names = [kind.name for kind in plain.parts(layer)]
    return found == {name: on_disk(plain.locate(layer, expert, name)) for name in names}


def test_a_cache_for_engines_gives_the_bytes_or_refuses_the_place(
    sound: Place, plain: Pack
) -> None:
    if is_refused_by_caches(sound):
        return
    with ExpertCache(sound.address, "1GiB", check="always") as cache:
        for layer, expert in keys_of(plain)[::3]:
            assert is_right(cache, plain, layer, expert)


KEY = ExpertKey(1, 5)
OTHER = ExpertKey(1, 6)
"""Experts whose parts lie in one file."""


def edits(offset: int) -> dict[str, Edit]:
    """Name what can happen to a file around a byte."""
    return {
        "a byte changed": lambda data: (
            data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        ),
        "cut": lambda data: data[:offset],
        "gone": lambda data: None,
    }


EDITS = tuple(edits(0))


def damage(place: Place, what: str) -> None:
    with moepack.open(place.address) as pack:
        where = pack.locate(*KEY, "up")
    place.change(where.path.name, edits(where.offset + 10)[what])


def uses(place: Place, pack: Pack) -> Iterator[Callable[[], object]]:
    """Yield the ways to come to a damaged file, after reads of another that is as it was."""
    with pack.reader(**place.options) as reader:
        reader.read(0, 1, "up")
        yield lambda: reader.read(*KEY, "up")
        yield lambda: list(reader.read_many([KEY], parts=("up", "down")))
        reader.read(0, 2, "up")


def assert_blames_the_pack(place: Place, pack: Pack) -> None:
    for use in uses(place, pack):
        with pytest.raises(PackError) as refused:
            use()
        assert refused.value.path
        assert refused.value.hint


@pytest.mark.parametrize("what", EDITS)
def test_damage_is_the_packs_fault_and_of_its_file_alone(what: str, place: Place) -> None:
    damage(place, what)
    report = moepack.verify(place.address)
    assert report.passed is False
    assert report.findings
    if what == "a byte changed":
        assert {(one.layer, one.expert) for one in report.findings} == {KEY}
    if what != "a byte changed" and (Path(place.address) / "shard-00001-of-00006.gguf").exists():
        with pytest.raises(PackError) as refused:  # an index looks at the lengths of its shards
            moepack.open(place.address)
        assert refused.value.hint
        return
    with moepack.open(place.address) as pack:
        assert_blames_the_pack(place, pack)
        if what != "a byte changed" and not place.is_remote and pack.is_local(*KEY):
            with pytest.raises(PackError) as refused:
                pack.tensor(*KEY, "up")
            assert refused.value.hint


@pytest.mark.parametrize("what", EDITS)
def test_damage_under_a_reader_is_an_error_or_changes_nothing(
    what: str, place: Place, plain: Pack
) -> None:
    """A file that is open may outlive its name, and one in a store is mostly seen to be another."""
    with moepack.open(place.address) as pack:
        with pack.reader(**place.options) as reader:
            assert reader.read(*OTHER, "up") == on_disk(plain.locate(*OTHER, "up"))
            damage(place, what)
            for _ in range(2):
                with contextlib.suppress(MachineError if place.is_remote else PackError, PackError):
                    assert reader.read(*KEY, "up") == on_disk(plain.locate(*KEY, "up"))
            assert reader.statistics.in_flight_count == 0
        assert_blames_the_pack(place, pack)


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_damage_is_an_error_of_a_cache_for_engines(
    when: str, what: str, place: Place, plain: Pack
) -> None:
    """The cache goes on with other files; an open one outlives its name."""
    if is_refused_by_caches(place):
        return
    if when == "before it is opened":
        damage(place, what)
        with pytest.raises(PackError), ExpertCache(place.address, "1GiB") as cache:
            cache.use(KEY.layer, [KEY.expert])
        return
    with ExpertCache(place.address, "1GiB") as cache:
        assert is_right(cache, plain, *OTHER)
        damage(place, what)
        if what == "gone":
            assert is_right(cache, plain, *KEY)
        else:
            with pytest.raises(PackError):
                cache.use(KEY.layer, [KEY.expert])
        assert is_right(cache, plain, 0, 2)
