"""Reading experts: every call, every backend, every real model gives the bytes that are on disk."""

import ctypes
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.common.errors import PackError, RequestError
from moepack.common.sizes import align
from moepack.pack.reading.expert_read import ExpertRead, read_of_parts
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.storage import threaded
from moepack.storage.buffers import map_memory
from tests.support.faulty_backend import Fault, FaultyBackend, make, require
from tests.support.gguf_builder import F32, moe
from tests.support.interruptions import before_each
from tests.support.models import first_shard, keys_of, on_disk, pack_model

PAGE = mmap.PAGESIZE


def part_names(pack: Pack, layer: int, family: str | None = None) -> list[str]:
    return [kind.name for kind in pack.parts(layer, family=family)]


def address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# What every call gives


def test_the_short_name_of_a_part_is_of_the_family_that_was_read(families: Path) -> None:
    with moepack.open(families) as pack, pack.reader() as reader:
        up = on_disk(pack.locate(0, 0, "up", family="ffn_chexps"))
        assert up != on_disk(pack.locate(0, 0, "up"))
        for parts in (None, ("up",), ("ffn_up_chexps.weight",)):
            (one,) = reader.read_many([(0, 0)], parts=parts, family="ffn_chexps")
            assert one.part("up") == one.part("ffn_up_chexps.weight") == up
            with pytest.raises(
                RequestError, match="ffn_up_exps.weight: this part was not requested"
            ):
                one.part("ffn_up_exps.weight")
        both = ("ffn_up_chexps.weight", "up")
        (one,) = reader.read_many([(0, 1)], parts=both)
        for part in both:
            assert one.part(part) == on_disk(pack.locate(0, 1, part))


def test_parts_of_two_files_are_two_reads(pack: Pack) -> None:
    """The second lies in its file where the first ends in another."""
    one, other = pack.locate(0, 1, "gate"), pack.locate(1, 1, "up")
    assert one.path != other.path
    behind = other._replace(offset=one.offset + one.length)
    for part, count in ((behind, 2), (behind._replace(path=one.path), 1)):
        read = read_of_parts(0, 1, (one, part), pack.part_names(0), gap=64)
        assert len(read.file_reads) == count


def test_keys_may_repeat_and_be_any_iterable(pack: Pack) -> None:
    keys = [(0, 3), (1, 2), (0, 3), (0, 3)]
    with pack.reader() as reader:
        experts = list(reader.read_many(iter(keys)))
        assert [one.view for one in experts] == [on_disk(pack.locate(*key)) for key in keys]
        experts[0].view[0] ^= 0xFF
        assert experts[2].view == experts[3].view != experts[0].view


def test_no_keys_are_no_reads(pack: Pack) -> None:
    with pack.reader() as reader:
        assert list(reader.read_many([])) == []
        assert list(reader.read_many([], into=[])) == []
        with reader.submit([]) as batch:
            assert not list(batch.completions(in_order=True))
        assert reader.statistics.read_count == 0
        assert reader.statistics.seconds == 0


def test_no_parts_are_refused_and_so_is_one_buffer_too_few(pack: Pack) -> None:
    with pack.reader() as reader:
        with pytest.raises(RequestError, match="no parts were requested"):
            reader.submit([(0, 0)], parts=())
        with pytest.raises(RequestError, match="one buffer for each key, expected 2, found 1"):
            reader.submit([(0, 0), (0, 1)], into=[bytearray(1 << 20)])
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
        "numpy, aligned": aligned[:length],
        "numpy, one byte off": aligned[1:][:length],
        "numpy, odd view": aligned[4093:][: length + 9],
        "matrix of floats": np.frombuffer(bytearray(filled[: (length + 15) // 8 * 8]), "f8"),
        "ctypes": (ctypes.c_ubyte * len(filled))(*filled),
    }


@pytest.mark.parametrize("part", [None, "up"])
def test_buffers_of_all_kinds_are_filled_and_nothing_behind(
    packs: dict[str, Path], name: str, part: str | None
) -> None:
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=name) as reader:
        expected = on_disk(pack.locate(0, 1, part) if part else pack.locate(0, 1))
        for kind, buffer in callers_buffers(len(expected)).items():
            assert reader.read_into(buffer, 0, 1, part) == len(expected)
            whole = memoryview(buffer).cast("B")
            assert whole[: len(expected)] == expected, kind
            assert set(whole[len(expected) :]) <= {0xAA}, kind


def test_a_callers_buffer_is_free_after_the_read(pack: Pack) -> None:
    buffer = bytearray(pack.locate(0, 0).length)
    memory = mmap.mmap(-1, len(buffer))
    with pack.reader() as reader:
        reader.read_into(buffer, 0, 0)
        reader.read_into(memory, 0, 0)
        for one in reader.read_many([(0, 1), (0, 1)], into=[buffer, memory]):
            one.view.release()
        memory.close()
        buffer.clear()


def test_nothing_is_copied_that_need_not_be(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    require("direct", pack.path)
    lengths: list[int] = []
    copying = (threaded, "map_memory")
    before_each(monkeypatch, lambda *place: lengths.append(place[-1]), copying)
    with pack.reader(backend="direct") as reader:
        reader.read(0, 0)
        reader.read(0, 0, "up")
        reader.read_into(mmap.mmap(-1, 1 << 17), 0, 1)
        list(reader.read_many([(0, 0), (0, 1)]))
    assert lengths == []


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
                message = f"expected {where.length:,} bytes, found {where.length - 1:,}"
                with pytest.raises(PackError, match=f"the file ends too early, {message}"):
                    read()


def test_views_outlive_their_reader_and_pack(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader() as reader:
        (one,) = reader.read_many([(1, 1)])
        part = one.part("up")
        expected = on_disk(pack.locate(1, 1, "up"))
    del one
    assert part == expected


# Parts in buffers of their own


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model whose parts are whole pages, with room between them in the pack."""
    folder = tmp_path_factory.mktemp("pages")
    builder = moe((0, 1), ne=(64, PAGE // 256), type_id=F32, block=(1, 4))
    builder.write(folder / "m.gguf")
    moepack.pack_model(folder / "m.gguf", folder / "pack", alignment=4 * PAGE)
    return folder / "pack"


@pytest.mark.parametrize("shift", [0, 64, 513])
def test_one_read_brings_parts_to_buffers_anywhere_in_a_page(
    shift: int, name: str, pages: Path
) -> None:
    backend = FaultyBackend(make(name))
    with moepack.open(pages) as pack, pack.reader(backend=backend, depth=3) as reader:
        keys = keys_of(pack)[:6]
        into = [
            {
                kind.name: map_memory(align(kind.length, PAGE) + PAGE)[shift : shift + kind.length]
                for kind in pack.parts(layer)
            }
            for layer, _ in keys
        ]
        for number, expert in enumerate(reader.read_many(keys, into=into)):
            for part, buffer in into[number].items():
                assert buffer == on_disk(pack.locate(*keys[number], part))
                assert expert.part(part) == buffer
            with pytest.raises(RequestError, match="buffers of their own"):
                expert.view  # noqa: B018
        begun = [(one.path, one.offset, one.length) for one in backend.begun]
        assert begun == [tuple(pack.locate(*key))[3:6] for key in keys]


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (["gate", "up"], 0),
        (["gate", "up", "down", "gate_up"], 0),
        (["gate", "up", "down", "ffn_down_exps.weight"], 0),
        (["gate", "up", "down"], -1),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_read(
    names: list[str], change: int, pages: Path
) -> None:
    backend = FaultyBackend(make("buffered"))
    with moepack.open(pages) as pack, pack.reader(backend=backend) as reader:
        length = pack.locate(0, 0, "gate").length + change
        with pytest.raises(RequestError) as raised:
            list(reader.read_many([(0, 0)], into=[{name: bytearray(length) for name in names}]))
        assert "layer 0 expert 0" in str(raised.value)
        assert not backend.begun


# So many reads and bytes in flight, no fewer and no more


def gated() -> tuple[FaultyBackend, threading.Event]:
    """Make a backend on which reads wait for an event."""
    gate = threading.Event()
    return FaultyBackend(make("buffered"), Fault(until=gate)), gate


def test_batches_share_the_depth(pack: Pack) -> None:
    backend, gate = gated()
    with pack.reader(backend=backend, depth=4) as reader:
        batches = []
        for layer, count, expected in ((0, 3, 3), (1, 5, 4), (0, 2, 5)):
            batches.append(reader.submit([(layer, n) for n in range(count)]))
            # The first of a batch is never held back.
            assert len(backend.begun) == expected == reader.statistics.in_flight_count
        gate.set()
        for batch in batches:
            for one in batch.completions():
                assert one.view == on_disk(pack.locate(one.layer, one.expert))
        assert backend.peak_count == 5


@pytest.mark.parametrize(("beyond", "expected"), [(0, 2), (-1, 1), (1, 2)])
def test_as_many_bytes_as_the_bound_says_are_in_flight(
    pack: Pack, beyond: int, expected: int
) -> None:
    backend, gate = gated()
    length = pack.locate(0, 0).length
    reader = pack.reader(backend=backend, max_in_flight=2 * length + beyond)
    with reader, reader.submit([(0, n) for n in range(4)]):
        assert len(backend.begun) == expected
        assert reader.statistics.in_flight_length == expected * length
        gate.set()


def test_what_waits_begins_when_an_expert_is_taken_and_not_only_with_the_next(pack: Pack) -> None:
    backend, gate = gated()
    reader = pack.reader(backend=backend, depth=2)
    with reader, reader.submit([(0, n) for n in range(6)]) as batch:
        assert len(backend.begun) == 2
        gate.set()
        next(batch.completions())
        assert len(backend.begun) in (3, 4)


# What the reader says of itself


def test_statistics_count_reads_and_bytes(pack: Pack, name: str) -> None:
    with pack.reader(backend=name, depth=2, max_in_flight=100_000) as reader:
        assert tuple(reader.statistics) == (name, 0, 0, 0, 0.0, 0, 0, 0, None, 0)
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


# Warming


def test_warming_reads_in_the_order_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {(layer, n): 1 + (n * 7 + layer) % 32 for layer in (0, 1) for n in range(16)}
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", counts=counts)
    keys: list[tuple[int, int]] = []

    def note(_: str, reader: Reader, reads: list[ExpertRead]) -> None:
        assert reader.backend == "buffered"
        keys.extend((read.layer, read.expert) for read in reads)

    before_each(monkeypatch, note, (Reader, "submit_reads"))
    with moepack.open(tmp_path / "pack") as opened:
        total = sum(opened.locate(*key).length for key in keys_of(opened))
        steps: list[int] = []
        assert opened.warm(1 << 40, progress=steps.append) == sum(steps) == total
        places = [opened.locate(*key)[3:5] for key in keys]
        assert places == sorted(places)
        assert sorted(keys) == sorted(keys_of(opened))
        keys.clear()
        assert opened.warm(opened.locate(*opened.hottest(1 << 40)[0]).length - 1) == 0
        assert opened.warm(0) == 0
        assert keys == []


def test_warming_a_family_reads_that_family(families: Path) -> None:
    with moepack.open(families) as pack:
        lengths = [pack.locate(0, n, family="ffn_chexps").length for n in range(2)]
        assert pack.warm(1 << 40, family="ffn_chexps") == sum(lengths)
