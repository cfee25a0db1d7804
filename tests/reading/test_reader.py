"""Reading experts: every call, every backend, every real model gives the bytes that are on disk."""

import ctypes
import functools
import gc
import itertools
import mmap
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moepack
from moepack.errors import MoepackError, PackError, RequestError
from moepack.reading.expert_read import ExpertRead
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader
from moepack.sizes import align
from moepack.storage import aligned_read
from tests.support.children import PATIENCE
from tests.support.faulty_backend import NAMES, Fault, FaultyBackend, make, require
from tests.support.gguf_builder import Q8_0, moe
from tests.support.models import REAL_MODELS, first_shard, keys_of, on_disk, pack_model

FINE_LAYOUT = """
description = "aligned to less than any drive asks for"
[files]
group = "layer"
name = "experts-{layer}.bin"
[blobs]
order = "source"
alignment = 64
[parts]
projections = ["gate_up", "gate", "up", "down", "attn_v"]
alignment = 64
small_alignment = 64
[dense]
alignment = 64
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model whose only layer has three families."""
    folder = tmp_path_factory.mktemp("families")
    pack_model([families_model(folder)], folder / "pack")
    return folder / "pack"


def families_model(folder: Path) -> Path:
    builder = moe((0,), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    return builder.write(folder / "m.gguf")


@functools.cache
def contents(path: Path) -> bytes:
    return path.read_bytes()


def part_names(pack: Pack, layer: int, family: str | None = None) -> list[str]:
    return [kind.name for kind in pack.parts(layer, family=family)]


def address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_families_have_the_names_of_the_source(families: Path) -> None:
    source = moepack.shape_of(families.parent / "m.gguf").families
    assert len({family.name for family in source}) == 3
    with moepack.open(families) as pack:
        assert pack.shape.families == source


# What every call gives


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_call_gives_what_is_on_disk(model: str, name: str, packs: dict[str, Path]) -> None:
    with moepack.open(packs[model]) as pack, pack.reader(backend=name) as reader:
        assert reader.backend == name
        keys = keys_of(pack)
        largest = max(pack.locate(*key).length for key in keys)
        buffer = bytearray(largest + 1)
        for key in keys:
            blob = pack.locate(*key)
            assert reader.read(*key) == on_disk(blob)
            assert reader.read_into(buffer, *key) == blob.length
            assert buffer[: blob.length] == on_disk(blob)
        for number, one in enumerate(reader.read_many(keys)):
            assert (one.number, one.layer, one.expert) == (number, *keys[number])
            assert one.view == on_disk(pack.locate(*keys[number]))
            for part in part_names(pack, one.layer):
                assert one.part(part) == on_disk(pack.locate(*keys[number], part))
        with reader.submit(keys) as batch:
            assert len(batch) == len(keys)
            came = {one.number: one for one in batch.completions()}
            assert len(batch) == 0
        assert [came[number].view for number in range(len(keys))] == [
            on_disk(pack.locate(*key)) for key in keys
        ]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_part_and_every_pair_of_parts_is_right(
    model: str, name: str, packs: dict[str, Path]
) -> None:
    with moepack.open(packs[model]) as pack, pack.reader(backend=name) as reader:
        for layer in pack.layers:
            names = part_names(pack, layer)
            keys = [(layer, 0), (layer, pack.expert_count(layer) - 1)]
            for part in names:
                short = part.removeprefix("ffn_").replace("_exps.weight", "").replace("_exps", "")
                for spelling in (part, short):
                    assert reader.read(layer, 1, spelling) == on_disk(pack.locate(layer, 1, part))
            for parts in itertools.permutations(names, 2):
                for one in reader.read_many(keys, parts=parts):
                    for part in parts:
                        where = pack.locate(one.layer, one.expert, part)
                        assert one.part(part) == on_disk(where)
                    other = next((part for part in names if part not in parts), None)
                    if other and not between(names, parts, other):
                        with pytest.raises(RequestError, match="not asked for"):
                            one.part(other)


def between(names: list[str], parts: tuple[str, ...], other: str) -> bool:
    places = [names.index(part) for part in parts]
    return min(places) < names.index(other) < max(places)


def test_all_parts_together_are_the_oracles_and_in_any_order_the_same(
    packs: dict[str, Path], name: str
) -> None:
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=name) as reader:
        names = part_names(pack, 1)
        assert len(names) == 6
        for seed in range(4):
            parts = names + names[:2]
            random.Random(seed).shuffle(parts)
            (one,) = reader.read_many([(1, 3)], parts=parts)
            assert one.view == on_disk(pack.locate(1, 3))[: len(one.view)]
            for part in names:
                assert one.part(part) == on_disk(pack.locate(1, 3, part))


def test_families_are_read_by_their_name(families: Path, name: str) -> None:
    with moepack.open(families) as pack, pack.reader(backend=name) as reader:
        for family in pack.families(0):
            keys = [(0, n) for n in range(pack.expert_count(0, family=family))]
            for one in reader.read_many(keys, family=family):
                blob = pack.locate(*keys[one.number], family=family)
                assert one.view == on_disk(blob) == reader.read(*keys[one.number], family=family)
                for kind in pack.parts(0, family=family):
                    where = pack.locate(*keys[one.number], kind.name)
                    assert one.part(kind.name) == on_disk(where)
                    assert reader.read(*keys[one.number], kind.name) == on_disk(where)
                for other in set(pack.families(0)) - {family}:
                    if one.expert < pack.expert_count(0, family=other):
                        stranger = pack.parts(0, family=other)[0].name
                        with pytest.raises(RequestError, match="not asked for"):
                            one.part(stranger)
        with pytest.raises(RequestError, match="layer 0 has no family nonsense"):
            reader.read(0, 0, family="nonsense")


def test_a_part_is_never_another_familys_than_the_one_asked_for(families: Path) -> None:
    with moepack.open(families) as pack, pack.reader() as reader:
        right = on_disk(pack.locate(0, 1, "ffn_up_chexps.weight"))
        try:
            assert reader.read(0, 1, "up", family="ffn_chexps") == right
        except RequestError:
            return


def test_the_short_name_of_a_part_is_of_the_family_that_was_read(families: Path, name: str) -> None:
    with moepack.open(families) as pack, pack.reader(backend=name) as reader:
        up = on_disk(pack.locate(0, 0, "up", family="ffn_chexps"))
        assert up != on_disk(pack.locate(0, 0, "up"))
        for parts in (None, ("up",), ("ffn_up_chexps.weight",)):
            (one,) = reader.read_many([(0, 0)], parts=parts, family="ffn_chexps")
            assert one.part("up") == one.part("ffn_up_chexps.weight") == up
            with pytest.raises(RequestError, match="ffn_up_exps.weight: this part was not asked"):
                one.part("ffn_up_exps.weight")


def test_parts_of_two_families_are_read_together(families: Path, name: str) -> None:
    parts = ("ffn_up_chexps.weight", "up")
    with moepack.open(families) as pack, pack.reader(backend=name) as reader:
        (one,) = reader.read_many([(0, 1)], parts=parts)
        for part in parts:
            assert one.part(part) == on_disk(pack.locate(0, 1, part))


def test_parts_of_two_files_are_two_reads(tmp_path: Path) -> None:
    """The second part lies in the second file where the first ends in the first file."""
    text = FINE_LAYOUT.replace('"layer"', '"size"').replace("{layer}", "{number}")
    text = text.replace('{number}.bin"', '{number}.bin"\nmax_length = "16 KiB"')
    (tmp_path / "fine.toml").write_text(text)
    pack_model([families_model(tmp_path)], tmp_path / "pack", str(tmp_path / "fine.toml"))
    checked = 0
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        assert len(pack.file_paths) > 1
        names = {name: part_names(pack, 0, name) for name in pack.families(0)}
        for first, second in itertools.permutations(names, 2):
            count = min(pack.expert_count(0, family=name) for name in (first, second))
            pairs = itertools.product(range(count), names[first], names[second])
            checked += sum(read_together(pack, reader, *pair) for pair in pairs)
    assert checked


def read_together(pack: Pack, reader: Reader, expert: int, part: str, other: str) -> bool:
    """Read two parts where the second begins at the byte of its file at which the first ends."""
    one, two = pack.locate(0, expert, part), pack.locate(0, expert, other)
    if one.path == two.path or not 0 <= two.offset - one.offset - one.length < 64:
        return False
    (both,) = reader.read_many([(0, expert)], parts=(part, other))
    assert both.part(part) == on_disk(one)
    assert both.part(other) == on_disk(two)
    return True


def test_keys_may_repeat_and_be_any_iterable(pack: Pack, name: str) -> None:
    keys = [(0, 3), (1, 2), (0, 3), (0, 3)]
    with pack.reader(backend=name) as reader:
        got = list(reader.read_many(iter(keys)))
        assert [one.view for one in got] == [on_disk(pack.locate(*key)) for key in keys]
        got[0].view[0] ^= 0xFF
        assert got[2].view == got[3].view != got[0].view


def test_no_keys_are_no_reads(pack: Pack, name: str) -> None:
    with pack.reader(backend=name) as reader:
        assert list(reader.read_many([])) == []
        assert list(reader.read_many([], into=[])) == []
        with reader.submit([]) as batch:
            assert not list(batch.completions(in_order=True))
        assert reader.statistics.read_count == 0
        assert reader.statistics.seconds == 0


def test_no_parts_are_refused_and_so_is_one_buffer_too_few(pack: Pack) -> None:
    with pack.reader() as reader:
        with pytest.raises(RequestError, match="no parts were asked for"):
            reader.submit([(0, 0)], parts=())
        with pytest.raises(RequestError, match="one buffer for each key, expected 2, found 1"):
            reader.submit([(0, 0), (0, 1)], into=[bytearray(1 << 20)])
        with pytest.raises(RequestError, match="no expert 16"):
            reader.submit([(0, 0), (0, 16)])
        assert reader.statistics.read_count == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "no such depth, expected 1 to 4096, found 0"),
        ({"depth": 4097}, "no such depth"),
        ({"max_in_flight": 0}, "no such bound, expected 1 byte or more, found 0"),
        ({"backend": "carrier-pigeon"}, "no such backend.*found 'carrier-pigeon'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    pack: Pack, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pack.reader(**options)


def test_nothing_is_read_before_the_first_is_asked_for(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"))
    with pack.reader(backend=backend) as reader:
        many = reader.read_many([(0, 0)])
        assert not backend.begun
        with reader.submit([(0, 1)]):
            assert [read.offset for read in backend.begun] == [pack.locate(0, 1).offset]
        next(many)
        assert len(backend.begun) == 2


# How many reads that takes


def test_neighbouring_parts_are_one_read_and_others_are_not(packs: dict[str, Path]) -> None:
    cases: list[tuple[tuple[str, ...], list[tuple[str, str]]]] = [
        (("gate", "up"), [("gate", "up")]),
        (("up", "gate"), [("gate", "up")]),
        (("up", "down"), [("up", "down")]),
        (("gate", "down"), [("gate", "gate"), ("down", "down")]),
        (("gate", "up", "down"), [("gate", "down")]),
        (("gate", "gate"), [("gate", "gate")]),
        (("up.bias", "gate.bias"), [("gate.bias", "up.bias")]),
        (("down", "gate.bias"), [("down", "gate.bias")]),
        (("gate", "down.bias"), [("gate", "gate"), ("down.bias", "down.bias")]),
    ]
    backend = FaultyBackend(make("buffered"))
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=backend) as reader:
        for parts, runs in cases:
            backend.begun.clear()
            before = reader.statistics.read_count
            list(reader.read_many([(0, 2)], parts=parts))
            expected = []
            for first, last in runs:
                start, end = pack.locate(0, 2, first), pack.locate(0, 2, last)
                in_pages = start.offset - start.offset % 4096
                length = align(end.offset + end.length - in_pages, 4096)
                expected.append((start.path, in_pages, length))
            assert backend.begun == expected, parts
            assert reader.statistics.read_count - before == len(runs)
        backend.begun.clear()
        reader.read(0, 2)
        assert [read.length for read in backend.begun] == [pack.locate(0, 2).length]


def test_reads_are_begun_in_the_order_asked(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"))
    keys = [(n % 2, n * 5 % 16) for n in range(16)]
    with pack.reader(backend=backend, depth=3) as reader:
        list(reader.read_many(keys, in_order=False))
    expected = [(pack.locate(*key).path, pack.locate(*key).offset) for key in keys]
    assert [read[:2] for read in backend.begun] == expected


def test_a_part_that_was_not_asked_for_is_not_given(packs: dict[str, Path]) -> None:
    """The gate's bias lies between, and is less than the alignment of weights."""
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader() as reader:
        (one,) = reader.read_many([(0, 2)], parts=("down", "up.bias"))
        with pytest.raises(RequestError, match="not asked for"):
            one.part("gate.bias")


# Where it goes


def callers_buffers(length: int) -> dict[str, Any]:
    """Make buffers of `length` bytes and some more, of all kinds, full of 0xAA."""
    filled = b"\xaa" * (length + 4200)
    anonymous = mmap.mmap(-1, len(filled))
    anonymous[:] = filled
    aligned = np.frombuffer(anonymous, np.uint8)
    return {
        "bytearray": bytearray(filled),
        "mmap": anonymous,
        "numpy": np.frombuffer(bytearray(filled), np.uint8),
        "numpy, aligned": aligned[:length],
        "numpy, one byte off": aligned[1:][:length],
        "numpy, a sector off": aligned[512:][: length + 8],
        "numpy, odd view": aligned[4093:][: length + 9],
        "matrix of floats": np.frombuffer(bytearray(filled[: (length + 15) // 8 * 8]), "f8"),
        "memoryview": memoryview(bytearray(filled))[7:],
    }


@pytest.mark.parametrize("part", [None, "up"])
def test_buffers_of_all_kinds_are_filled_and_nothing_behind(
    packs: dict[str, Path], name: str, part: str | None
) -> None:
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=name) as reader:
        length = len(on_disk(pack.locate(0, 0, part) if part else pack.locate(0, 0)))
        kinds = list(callers_buffers(length))
        for expert, kind in enumerate(kinds):
            expert %= pack.expert_count(0)
            expected = on_disk(pack.locate(0, expert, part) if part else pack.locate(0, expert))
            for into in (False, True):
                buffer = callers_buffers(length)[kind]
                if into:
                    parts = None if part is None else (part,)
                    (one,) = reader.read_many([(0, expert)], parts=parts, into=[buffer])
                    assert address(one.view) == address(buffer)
                    one.release()
                else:
                    assert reader.read_into(buffer, 0, expert, part) == length
                whole = memoryview(buffer).cast("B")
                assert whole[:length] == expected, kind
                assert set(whole[length:]) <= {0xAA}, kind


def test_bytes_before_and_behind_a_slice_are_left_alone(pack: Pack, name: str) -> None:
    length = pack.locate(0, 0, "down").length
    with pack.reader(backend=name) as reader:
        for start in (0, 1, 511, 512, 4096, 5000):
            memory = mmap.mmap(-1, length + 3 * 4096)
            memory[:] = b"\x55" * len(memory)
            with memoryview(memory) as view:
                reader.read_into(view[start : start + length], 0, 4, "down")
            assert memory[:start] == b"\x55" * start
            assert memory[start : start + length] == on_disk(pack.locate(0, 4, "down"))
            assert set(memory[start + length :]) == {0x55}


def test_a_callers_buffer_is_free_after_the_read(pack: Pack, name: str) -> None:
    buffer = bytearray(pack.locate(0, 0).length)
    memory = mmap.mmap(-1, len(buffer))
    with pack.reader(backend=name) as reader:
        reader.read_into(buffer, 0, 0)
        reader.read_into(memory, 0, 0)
        for one in reader.read_many([(0, 1), (0, 1)], into=[buffer, memory]):
            one.view.release()
        memory.close()
        buffer.clear()


def test_ctypes_arrays_and_any_numpy_type_are_buffers(pack: Pack) -> None:
    """Pinned memory comes as a ctypes array more often than as anything else."""
    length = pack.locate(0, 0).length
    with pack.reader() as reader:
        for buffer in (np.zeros(length, ">u2"), (ctypes.c_ubyte * length)()):
            assert reader.read_into(buffer, 0, 0) == length
            assert bytes(buffer)[:length] == on_disk(pack.locate(0, 0))


@pytest.mark.parametrize("register", [False, True])
def test_a_pools_buffers_are_used_and_given_back(pack: Pack, name: str, register: bool) -> None:
    keys = keys_of(pack)
    pool = moepack.BufferPool(4, max(pack.locate(*key).length for key in keys), register=register)
    with pack.reader(backend=name, pool=pool, depth=3) as reader:
        seen = set()
        for number, one in enumerate(reader.read_many(keys)):
            with one:
                assert one.view == on_disk(pack.locate(*keys[number]))
                assert address(one.view) % mmap.PAGESIZE == 0
                seen.add(address(one.view))
        assert len(seen) <= 4
        assert pool.free_count == 4
        for in_order in (False, True):
            for one in reader.read_many(keys, parts=("gate", "down"), in_order=in_order):
                for part in ("gate", "down"):
                    assert one.part(part) == on_disk(pack.locate(one.layer, one.expert, part))
                one.release()
                one.release()
        assert pool.free_count == 4
        assert address(reader.read(0, 0)) not in seen
        (own,) = reader.read_many([(0, 0)], into=[bytearray(pool.length)])
        own.release()
        assert pool.free_count == 4


def test_what_was_released_is_not_given_to_two(pack: Pack) -> None:
    pool = moepack.BufferPool(2, 1 << 16)
    with pack.reader(pool=pool) as reader, reader.submit([(0, n) for n in range(6)]) as batch:
        held = next(batch.completions())
        for one in batch.completions():
            assert address(one.view) != address(held.view)
            one.release()
        assert held.view == on_disk(pack.locate(0, held.expert))
        assert pool.free_count == 1
        held.release()
    assert pool.free_count == 2


def test_new_memory_starts_on_a_page(packs: dict[str, Path], name: str) -> None:
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=name) as reader:
        assert address(reader.read(0, 1)) % mmap.PAGESIZE == 0
        for part in ("gate", "up", "down"):
            assert address(reader.read(0, 1, part)) % mmap.PAGESIZE == 0
        for one in reader.read_many([(1, 1), (1, 2)]):
            assert address(one.view) % mmap.PAGESIZE == 0
        for one in reader.read_many([(1, 1), (1, 2)], parts=("gate", "down")):
            assert address(one.part("gate")) % mmap.PAGESIZE == 0
            assert address(one.part("down")) % mmap.PAGESIZE == 0


class Copies:
    """Counts the reads that go through memory that is not the caller's, and its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        original = aligned_read.RoundedRead._ours

        def counted(read: aligned_read.RoundedRead, start: int, length: int) -> memoryview:
            self.lengths.append(length)
            return original(read, start, length)

        monkeypatch.setattr(aligned_read.RoundedRead, "_ours", counted)

    def take(self) -> list[int]:
        taken, self.lengths = self.lengths, []
        return taken


@pytest.mark.parametrize("direct", ["direct", "uring"])
def test_nothing_is_copied_that_need_not_be(
    packs: dict[str, Path], direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(direct, packs["gpt-oss"])
    pool = moepack.BufferPool(4, 1 << 17)
    copies = Copies(monkeypatch)
    with (
        moepack.open(packs["gpt-oss"]) as pack,
        pack.reader(backend=direct) as reader,
        pack.reader(backend=direct, pool=pool) as pooled,
    ):
        length = pack.locate(0, 0).length
        copies.take()
        memory = mmap.mmap(-1, 2 * length)
        reader.read(0, 0)
        reader.read_into(memory, 0, 1)
        halves = [memoryview(memory)[:length], memoryview(memory)[length:]]
        for one in (
            *reader.read_many([(0, 0), (0, 1)]),
            *reader.read_many([(0, 0), (0, 1)], into=halves),
            *pooled.read_many([(0, 0), (0, 1)]),
        ):
            assert one.view == on_disk(pack.locate(one.layer, one.expert))
        assert copies.take() == []
        # Of parts nothing is copied either: they lie in pages of their own, read as a whole.
        parts = ("gate", "down", "up.bias")
        assert reader.read(0, 0, "up") == on_disk(pack.locate(0, 0, "up"))
        for one in reader.read_many([(0, 1)], parts=parts):
            for part in parts:
                assert one.part(part) == on_disk(pack.locate(0, 1, part))
        assert copies.take() == []
        # In a caller's memory, which may not be written beyond, only their ends are.
        reader.read_into(memory, 0, 0, "up")
        (tail,) = copies.take()
        assert tail <= 4096
        for one in reader.read_many([(0, 1)], parts=parts, into=[memory]):
            for part in parts:
                assert one.part(part) == on_disk(pack.locate(0, 1, part))
        assert sum(copies.take()) <= 3 * 4096
        reader.read_into(bytearray(length + 1), 0, 0)
        copies.take()
        one_off = memoryview(mmap.mmap(-1, length + 4096))[1:]
        reader.read_into(one_off, 0, 0)
        assert copies.take() == [length]


def test_memory_of_dropped_experts_is_used_again_and_of_kept_ones_is_not(
    pack: Pack, name: str
) -> None:
    with pack.reader(backend=name, depth=2) as reader:
        first = reader.read(0, 1)
        kept = first[100:200]
        place = address(first)
        del first
        others = [one.view for one in reader.read_many([(0, n) for n in range(8)])]
        assert place not in map(address, others)
        assert kept == on_disk(pack.locate(0, 1))[100:200]
        del kept
        assert place in (address(reader.read(0, 1)), address(reader.read(0, 2)))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_an_ended_reader_keeps_no_memory(pack: Pack, name: str, end: str) -> None:
    reader = pack.reader(backend=name)
    arena = reader._arena
    view = reader.read(0, 1)
    reader.read(0, 2)
    assert arena.kept_length
    if end == "close":
        reader.close()
    del reader
    gc.collect()
    assert arena.kept_length == 0
    assert view == on_disk(pack.locate(0, 1))
    del view
    assert arena.kept_length == 0


def test_a_rounded_read_that_lacks_its_last_byte_is_short(fine: Path) -> None:
    """What is read before a part, up to the start of its page, is not counted as the part's."""
    with moepack.open(fine) as pack:
        where = next(
            where
            for expert in range(8)
            if (where := pack.locate(0, expert, "up")).offset % 4096 > 100
        )
        end = where.offset + where.length
        missing = align(end, 4096) - end + 1
        backend = FaultyBackend(make("buffered"), Fault(missing=missing))
        with pack.reader(backend=backend) as reader:
            for read in (
                lambda: reader.read(0, where.expert, "up"),
                lambda: list(reader.read_many([(0, where.expert)], parts=("up",))),
            ):
                found = f"expected {where.length:,} bytes, found {where.length - 1:,}"
                with pytest.raises(PackError, match=f"the file ends too early, {found}"):
                    read()


def test_views_outlive_their_reader_and_pack(packs: dict[str, Path], name: str) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader(backend=name) as reader:
        (one,) = reader.read_many([(1, 1)])
        part = one.part("up")
        expected = on_disk(pack.locate(1, 1, "up"))
    del one
    assert part == expected


# What the reader says of itself


def test_statistics_count_reads_and_bytes(pack: Pack, name: str) -> None:
    with pack.reader(backend=name, depth=2, max_in_flight=100_000) as reader:
        assert tuple(reader.statistics) == (name, 0, 0, 0, 0.0, 0, 0, 0, None)
        length = len(reader.read(0, 0)) + len(reader.read(0, 1, "up"))
        assert reader.statistics.read_count == 2
        assert reader.statistics.read_length == length
        assert reader.statistics.peak_length == pack.locate(0, 0).length
        for one in reader.read_many(keys_of(pack)):
            length += len(one.view)
        now = reader.statistics
        assert (now.backend, now.error_count) == (name, 0)
        assert (now.read_count, now.read_length) == (34, length)
        assert (now.in_flight_count, now.in_flight_length) == (0, 0)
        assert 0 < now.peak_length <= 100_000
        assert now.seconds > 0
    assert reader.statistics == now


def test_seconds_run_while_something_is_in_flight(pack: Pack) -> None:
    with pack.reader(backend=FaultyBackend(make("buffered"))) as reader:
        batch = reader.submit([(0, 0)])
        first, second = reader.statistics, reader.statistics
        assert first.in_flight_count == 1
        assert first.in_flight_length == pack.locate(0, 0).length == first.peak_length
        assert 0 < first.seconds < second.seconds
        list(batch.completions())
        assert reader.statistics.seconds == reader.statistics.seconds > second.seconds


def test_the_reader_says_which_backend_reads_and_why(pack: Pack, name: str) -> None:
    with pack.reader(backend=name) as reader:
        assert reader.backend == name
        assert reader.why == f"asked for; {name} reads experts-00000.bin right"
    with pack.reader(backend=FaultyBackend(make(name))) as reader:
        assert (reader.backend, reader.why) == (name, "given by the caller")
    with pack.reader() as reader:
        assert reader.backend in NAMES
        assert reader.why


# Several threads


def test_threads_share_a_reader_in_any_mixture(packs: dict[str, Path], name: str) -> None:
    problems: list[BaseException] = []
    with (
        moepack.open(packs["gpt-oss"]) as pack,
        pack.reader(backend=name, depth=5, max_in_flight=120_000) as reader,
    ):
        keys = keys_of(pack)

        def work(seed: int) -> None:
            choice = random.Random(seed)
            try:
                for _ in range(12):
                    mix_of_reads(pack, reader, choice, choice.choices(keys, k=5))
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert problems == []
        assert reader.statistics.in_flight_count == reader.statistics.in_flight_length == 0
        assert reader.statistics.error_count == 0


def mix_of_reads(
    pack: Pack, reader: Reader, choice: random.Random, keys: list[tuple[int, int]]
) -> None:
    part = choice.choice(part_names(pack, keys[0][0]))
    assert reader.read(*keys[0], part) == on_disk(pack.locate(*keys[0], part))
    buffer = bytearray(1 << 16)
    length = reader.read_into(buffer, *keys[1])
    assert buffer[:length] == on_disk(pack.locate(*keys[1]))
    for one in reader.read_many(keys, in_order=choice.random() < 0.5):
        assert one.view == on_disk(pack.locate(*keys[one.number]))
    with reader.submit(keys, parts=(part,)) as batch:
        for one in itertools.islice(batch.completions(), choice.randrange(6)):
            assert one.part(part) == on_disk(pack.locate(*keys[one.number], part))


# Packs that suit no drive


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine")
    (folder / "fine.toml").write_text(FINE_LAYOUT)
    pack_model([first_shard("gpt-oss")], folder / "pack", str(folder / "fine.toml"))
    return folder / "pack"


def test_packs_aligned_to_less_than_a_sector_are_read_right(fine: Path, name: str) -> None:
    pool = moepack.BufferPool(3, 1 << 16, register=True)
    with (
        moepack.open(fine) as pack,
        pack.reader(backend=name) as reader,
        pack.reader(backend=name, pool=pool, depth=2) as pooled,
    ):
        keys = keys_of(pack)
        assert any(pack.locate(*key).offset % 512 for key in keys)
        for key in keys:
            assert reader.read(*key) == on_disk(pack.locate(*key))
            for part in part_names(pack, key[0]):
                assert reader.read(*key, part) == on_disk(pack.locate(*key, part))
        for one in pooled.read_many(keys):
            assert one.view == on_disk(pack.locate(*keys[one.number]))
            one.release()
        for parts in (("gate", "up"), ("gate", "down"), ("up", "down.bias")):
            for one in reader.read_many(keys, parts=parts, in_order=False):
                for part in parts:
                    assert one.part(part) == on_disk(pack.locate(*keys[one.number], part))


# Warming


def cached_pages(path: Path) -> list[bool]:
    """Say of each page of a file whether it is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), length, flags=mmap.MAP_PRIVATE)
    count = -(-length // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * count)()
    start = (ctypes.c_char * length).from_buffer(mapped)
    result = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(length), answer)
    del start
    mapped.close()
    if result:
        pytest.skip("mincore does not work here")
    return [bool(byte & 1) for byte in answer]


def forget(path: Path) -> None:
    """Put a file out of the page cache, or skip the test."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(cached_pages(path)):
        pytest.skip("this file system keeps its pages")


def test_warming_brings_the_hottest_into_the_page_cache(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("Linux's page cache")
    counts = {
        (layer, expert): 1 + (expert * 7 + layer) % 32 for layer in (0, 1) for expert in range(16)
    }
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", counts=counts)
    with moepack.open(tmp_path / "pack") as pack:
        for path in pack.file_paths:
            forget(path)
        budget = 400_000
        hottest = pack.hottest(budget)
        steps: list[int] = []
        assert pack.warm(budget, progress=steps.append) == sum(steps) <= budget
        assert sorted(steps) == sorted(pack.locate(*key).length for key in hottest)
        for key in hottest:
            blob = pack.locate(*key)
            pages = cached_pages(blob.path)
            first = blob.offset // mmap.PAGESIZE
            assert all(pages[first : first + blob.length // mmap.PAGESIZE])


def test_warming_reads_in_the_order_of_the_files(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    original = Reader.submit_reads

    def noted(reader: Reader, reads: list[ExpertRead]) -> Any:
        assert reader.backend == "buffered"
        asked.extend((read.layer, read.expert) for read in reads)
        return original(reader, reads)

    monkeypatch.setattr(Reader, "submit_reads", noted)
    with moepack.open(packs["mixtral"]) as opened:
        total = sum(opened.locate(*key).length for key in keys_of(opened))
        assert opened.warm(1 << 40) == total
        places = [opened.locate(*key)[3:5] for key in asked]
        assert places == sorted(places)
        assert sorted(asked) == sorted(keys_of(opened))
        asked.clear()
        assert opened.warm(opened.locate(*opened.hottest(1 << 40)[0]).length - 1) == 0
        assert opened.warm(0) == 0
        assert asked == []


def test_warming_a_family_reads_that_family(families: Path) -> None:
    with moepack.open(families) as pack:
        lengths = [pack.locate(0, n, family="ffn_chexps").length for n in range(2)]
        assert pack.warm(1 << 40, family="ffn_chexps") == sum(lengths)


def test_warming_names_the_file_that_is_missing(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        pack.file_paths[1].unlink()
        with pytest.raises(PackError, match=r"experts-00001\.bin: layer 1 .*file is missing"):
            pack.warm(1 << 40)


def test_a_reader_changes_nothing_about_where_things_lie(pack: Pack) -> None:
    before = [(pack.locate(*key), pack.locate(*key, "up")) for key in keys_of(pack)]
    with pack.reader() as reader:
        list(reader.read_many(keys_of(pack)))
        pack.warm(1 << 20)
    assert before == [(pack.locate(*key), pack.locate(*key, "up")) for key in keys_of(pack)]
    with pack.reader() as again:
        assert again.read(0, 0) == on_disk(pack.locate(0, 0))


# Any request


@pytest.mark.long
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_request_gives_the_same_bytes_as_the_files(
    data: st.DataObject, packs: dict[str, Path]
) -> None:
    model = data.draw(st.sampled_from(["gpt-oss", "granite"]))
    with moepack.open(packs[model]) as pack:
        names = part_names(pack, pack.layers[0])
        keys = data.draw(st.lists(st.sampled_from(keys_of(pack)), max_size=12))
        parts = data.draw(st.none() | st.lists(st.sampled_from(names), min_size=1, max_size=6))
        in_order = data.draw(st.booleans())
        backend = make(data.draw(st.sampled_from(["buffered", "direct"])))
        has_pool = data.draw(st.booleans())
        pool = moepack.BufferPool(2, 1 << 17) if has_pool else None
        depth = data.draw(st.integers(1, 40))
        bound = data.draw(st.integers(1, 1 << 18))
        with pack.reader(backend=backend, pool=pool, depth=depth, max_in_flight=bound) as reader:
            numbers = []
            for one in reader.read_many(keys, parts=parts, in_order=in_order):
                numbers.append(one.number)
                layer, expert = keys[one.number]
                assert (one.layer, one.expert) == (layer, expert)
                if parts is None:
                    assert one.view == on_disk(pack.locate(layer, expert))
                for part in parts or names:
                    assert one.part(part) == on_disk(pack.locate(layer, expert, part))
                one.release()
            expected = list(range(len(keys)))
            assert (numbers if in_order else sorted(numbers)) == expected
            now = reader.statistics
            assert now.in_flight_count == now.in_flight_length == now.error_count == 0


def test_errors_are_moepacks_own(pack: Pack) -> None:
    with pack.reader() as reader, pytest.raises(MoepackError):
        reader.read(99, 99, "nothing", family="nobody")
