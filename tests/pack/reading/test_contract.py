"""The promises that every way to read keeps, with every backend and on every kind of pack."""

import errno
import os
import random
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError
from moepack.pack.reading.pack import Pack
from moepack.storage.arena import Arena
from tests.support.faulty_backend import FaultyBackend, fault_at, make
from tests.support.interruptions import fail_at
from tests.support.models import REAL_MODELS, first_shard, keys_of, on_disk
from tests.support.ways import IN_ORDER, READS_TO_NEW_MEMORY, WAYS, Reading


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def all_packs(
    packs: dict[str, Path], fine: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Return packs of all kinds, each with one that has the same parts as they are."""
    folder = tmp_path_factory.mktemp("packs")
    made = {model: (packs[model], packs[model]) for model in REAL_MODELS}
    made["aligned to 64 bytes"] = fine, packs["gpt-oss"]
    moepack.index_model(first_shard("gpt-oss"), folder / "index", digests=True)
    made["index"] = folder / "index", packs["gpt-oss"]
    moepack.index_model(first_shard("granite"), folder / "bare")
    made["index without digests"] = folder / "bare", packs["granite"]
    return made


def check(reading: Reading, plain: Pack) -> None:
    """Compare all that came with a pack in which it lies as it is, and see that all came."""
    assert reading.errors == []
    assert sorted(reading.experts) == list(range(len(reading.keys)))
    for number, contents in reading.experts.items():
        key = reading.keys[number]
        has_blob = plain.path == reading.pack.path and reading.parts is None
        for part, data in contents.items():
            if part:
                assert data == on_disk(plain.locate(*key, part, family=reading.family))
            elif has_blob:
                assert data == on_disk(plain.locate(*key, family=reading.family))


def test_it_gives_the_bytes_that_were_packed(
    way: str, name: str, all_packs: dict[str, tuple[Path, Path]]
) -> None:
    choice = random.Random(f"{way} {name}")
    for path, plain_path in all_packs.values():
        with moepack.open(path) as pack, moepack.open(plain_path) as plain:
            layer, depth = choice.choice(pack.layers), choice.choice((1, 4))
            options = {"backend": name, "depth": depth, "max_in_flight": 200_000}
            keys = choice.sample([key for key in keys_of(pack) if key[0] == layer], 4)
            names = [kind.name for kind in pack.parts(layer)]
            for parts in (None, choice.choice((("down",), tuple(choice.sample(names, 2))))):
                reading = Reading(pack, [*keys, keys[0]], parts, options=options)
                WAYS[way](reading)
                check(reading, plain)
                if way in IN_ORDER:
                    assert reading.order == sorted(reading.order)


def test_it_reads_the_family_that_was_named(way: str, families: Path) -> None:
    with moepack.open(families) as pack:
        for family in pack.families(0):
            keys = [(0, n) for n in range(pack.expert_count(0, family=family))]
            short = (pack.parts(0, family=family)[0].name.split("_")[1].partition(".")[0],)
            for parts in (None, short if family != "attn_v_exps" else None):
                reading = Reading(pack, keys, parts, family, {"backend": "buffered"})
                WAYS[way](reading)
                check(reading, pack)


def test_an_expert_that_fails_has_an_error_with_its_place_and_the_rest_comes(
    way: str, name: str, pack: Pack
) -> None:
    keys = [(n % 2, n) for n in range(8)]
    backend = FaultyBackend(
        make(name),
        fault_at(pack, *keys[1], code=errno.EIO),
        fault_at(pack, *keys[4], missing=100),
        fault_at(pack, *keys[6], flip=0),
    )
    reading = Reading(pack, keys, options={"backend": backend, "depth": 4})
    WAYS[way](reading)
    blobs = [pack.locate(*key) for key in keys]
    gate = pack.locate(*keys[6], "gate")
    messages = [
        f"{blobs[1].path}: layer 1 expert 1 blob at byte {blobs[1].offset:,}: cannot read: "
        f"{os.strerror(errno.EIO)}",
        f"{blobs[4].path}: layer 0 expert 4 blob at byte {blobs[4].offset:,}: the file ends too "
        f"early, expected {blobs[4].length:,} bytes, found {blobs[4].length - 100:,}",
        f"{gate.path}: layer 0 expert 6 {gate.part} at byte {gate.offset:,}: the bytes do not have "
        f"the digest in the index, expected xxh3:{gate.digest:016x}, found xxh3:",
    ]
    kinds: dict[str, type[MoepackError]] = dict(
        zip(messages, (MachineError, PackError, PackError), strict=True)
    )
    for error in reading.errors:
        (message,) = (text for text in messages if str(error).startswith(text))
        assert type(error) is kinds[message]
        assert "moepack verify" in str(error.hint)
        messages.remove(message)
    for number, contents in reading.experts.items():
        for part, data in contents.items():
            where = pack.locate(*keys[number], part) if part else blobs[number]
            assert data == on_disk(where)
    assert messages == []
    assert sorted(reading.experts) == [0, 2, 3, 5, 7]
    if way in IN_ORDER:
        assert reading.order == [0, -1, 2, 3, -1, 5, -1, 7]
    assert reading.statistics is not None
    assert reading.statistics.error_count == 3
    assert backend.is_closed
    assert backend.open_queues == 0


@pytest.mark.parametrize("way", READS_TO_NEW_MEMORY)
def test_memory_that_cannot_be_had_is_the_error_of_one_expert(
    way: str, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failing in range(3):
        fail_at(monkeypatch, failing + 1, MachineError("cannot allocate it"), (Arena, "allocate"))
        reading = Reading(pack, [(0, n) for n in range(3)], options={"depth": 2})
        WAYS[way](reading)
        monkeypatch.undo()
        (error,) = reading.errors
        where = pack.locate(0, failing)
        place = f"layer 0 expert {failing} blob at byte {where.offset:,}"
        assert str(error) == f"{where.path}: {place}: cannot allocate it"
        assert sorted(reading.experts) == [n for n in range(3) if n != failing]


@pytest.mark.parametrize(
    ("key", "parts", "family", "message"),
    [
        ((0, 16), None, None, "no expert 16"),
        ((0, -1), None, None, "no expert -1"),
        ((7, 0), None, None, "no experts in layer 7"),
        ((0, 1), ("sideways",), None, "no part sideways"),
        ((0, 1), None, "nonsense", "layer 0 has no family nonsense"),
    ],
)
def test_a_key_that_is_not_there_is_refused_before_anything_is_read(
    way: str,
    key: tuple[int, int],
    parts: tuple[str, ...] | None,
    family: str | None,
    message: str,
    pack: Pack,
) -> None:
    backend = FaultyBackend(make("buffered"))
    reading = Reading(pack, [key], parts, family, {"backend": backend})
    if way != "scattered":  # whose buffers are made for each part that there is
        WAYS[way](reading)
        (error,) = reading.errors
        assert isinstance(error, RequestError)
        assert message in str(error)
    assert backend.begun == []
