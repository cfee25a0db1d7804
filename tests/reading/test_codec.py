"""Parts stored by zstd are read as they were packed, every way there is, or with an error."""

import asyncio
import gc
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

import moepack
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.packing.pack_model import pack_model
from moepack.reading.aio import AsyncReader
from moepack.reading.pack import Pack
from moepack.report.inspection import describe_blob
from moepack.storage import frames
from moepack.storage.buffers import BufferPool
from moepack.storage.thread_pool import ThreadPool
from tests.support.compressible import (
    compressible,
    part_number,
    store,
    with_biases,
    write_model,
)
from tests.support.models import flip, keys_of
from tests.support.reads import nothing_left

PAGE = 4096
GATE, UP, DOWN = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
Parts = dict[tuple[int, int, str], bytes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "shards", with_biases(compressible()))


@pytest.fixture(scope="module")
def path(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model of which each expert has parts that are stored by a codec, and others."""
    pack_model(model, tmp_path_factory.mktemp("coded") / "pack", codec="zstd")
    return tmp_path_factory.getbasetemp() / "coded0" / "pack"


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Return the bytes of all parts, by a pack without a codec."""
    plain = tmp_path_factory.mktemp("plain") / "pack"
    pack_model(model, plain)
    with moepack.open(plain) as pack, pack.reader() as reader:
        return {
            (layer, expert, kind.name): bytes(reader.read(layer, expert, kind.name))
            for layer, expert in keys_of(pack)
            for kind in pack.parts(layer)
        }


@pytest.fixture
def coded(path: Path) -> Iterator[Pack]:
    with moepack.open(path) as pack:
        yield pack


def run(work: Callable[[], Coroutine[Any, Any, object]]) -> object:
    """Run `work` in a loop, for so long that nothing can be waiting for ever."""

    async def bounded() -> object:
        async with asyncio.timeout(15):
            return await work()

    return asyncio.run(bounded())


def parts_of(expert: moepack.ExpertBytes, pack: Pack) -> Parts:
    """Return the bytes of the parts of an expert that was read whole."""
    return {
        (expert.layer, expert.expert, kind.name): bytes(expert.part(kind.name))
        for kind in pack.parts(expert.layer)
    }


# Every way of reading


def test_a_part_is_read_as_it_was_packed(name: str, coded: Pack, expected: Parts) -> None:
    with coded.reader(backend=name) as reader:
        for (layer, expert, part), data in expected.items():
            assert reader.read(layer, expert, part) == data
            buffer = bytearray(b"\7" * (len(data) + 9))
            assert reader.read_into(buffer, layer, expert, part) == len(data)
            assert buffer == data + b"\7" * 9
        assert reader.statistics.error_count == 0


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("depth", [1, 5])
def test_whole_experts_are_read_as_they_were_packed(
    name: str, coded: Pack, expected: Parts, depth: int, in_order: bool
) -> None:
    keys = keys_of(coded) * 3
    with coded.reader(backend=name, depth=depth) as reader:
        came = []
        for expert in reader.read_many(keys, in_order=in_order):
            came.append((expert.layer, expert.expert))
            for key, data in parts_of(expert, coded).items():
                assert data == expected[key]
        assert (came if in_order else sorted(came)) == (keys if in_order else sorted(keys))


@pytest.mark.parametrize("parts", [("gate", "up"), ("up",), ("down", "gate.bias"), ("down.bias",)])
def test_some_parts_are_read_as_they_were_packed(
    name: str, coded: Pack, expected: Parts, parts: tuple[str, ...]
) -> None:
    keys = [(0, expert) for expert in range(4)]
    with coded.reader(backend=name) as reader:
        for key, got in zip(keys, reader.read_many(keys, parts=parts), strict=True):
            for part in parts:
                assert got.part(part) == expected[*key, coded.locate(*key, part).part]
            others = {kind.name for kind in coded.parts(0)} - {
                coded.locate(0, 0, part).part for part in parts
            }
            for other in others:
                with pytest.raises(RequestError, match="not asked for"):
                    got.part(other)


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_parts_come_into_buffers_of_the_callers(
    name: str, coded: Pack, expected: Parts, shift: int
) -> None:
    """One buffer for each expert, or one for each of its parts."""
    keys = keys_of(coded)
    with coded.reader(backend=name, depth=3) as reader:
        length = len(reader.read(*keys[0]))
        whole = [bytearray(b"\7" * (length + shift + 9)) for _ in keys]
        into = [memoryview(buffer)[shift:] for buffer in whole]
        for got in reader.read_many(keys, into=into):
            for key, data in parts_of(got, coded).items():
                assert data == expected[key]
        for buffer in whole:
            assert buffer[:shift] + buffer[-9:] == b"\7" * (shift + 9)
        apart = [
            {
                kind.name: memoryview(bytearray(b"\7" * (kind.length + shift + 9)))[shift:]
                for kind in coded.parts(layer)
            }
            for layer, _ in keys
        ]
        for number, got in enumerate(reader.read_many(keys, into=apart)):
            for part, place in apart[number].items():
                data = expected[*keys[number], part]
                assert place == data + b"\7" * 9
                assert got.part(part) == data


def test_experts_come_into_the_buffers_of_a_pool(name: str, coded: Pack, expected: Parts) -> None:
    keys = keys_of(coded)
    with coded.reader() as reader:
        length = len(reader.read(*keys[0]))
    assert length > coded.locate(*keys[0]).length
    pool = BufferPool(2, length, register=True)
    with coded.reader(backend=name, pool=pool) as reader:
        for expert in reader.read_many(keys, in_order=False):
            with expert:
                for key, data in parts_of(expert, coded).items():
                    assert data == expected[key]
        assert pool.free_count == 2
    small = BufferPool(2, coded.locate(*keys[0]).length)
    too_small = pytest.raises(RequestError, match=f"too small, expected {length:,} bytes")
    with coded.reader(backend=name, pool=small) as reader, too_small:
        reader.submit(keys)


def test_asyncio_reads_as_they_were_packed(name: str, coded: Pack, expected: Parts) -> None:
    async def work() -> None:
        async with AsyncReader(coded, backend=name, depth=4) as reader:
            reads = [reader.read(*key) for key in expected]
            for key, view in zip(expected, await asyncio.gather(*reads), strict=True):
                assert view == expected[key]
            for in_order in (True, False):
                async for got in reader.read_many(keys_of(coded), in_order=in_order):
                    for key, data in parts_of(got, coded).items():
                        assert data == expected[key]
            buffer = bytearray(len(expected[0, 1, GATE]))
            await reader.read_into(buffer, 0, 1, GATE)
            assert buffer == expected[0, 1, GATE]

    run(work)


@pytest.mark.parametrize("alignment", [64, 512, 2048])
def test_alignments_other_than_pages_are_read_too(
    alignment: int, name: str, model: Path, expected: Parts, tmp_path: Path
) -> None:
    pack_model(model, tmp_path / "pack", codec="zstd:1", alignment=alignment, layout="hot-first")
    with moepack.open(tmp_path / "pack") as pack, pack.reader(backend=name) as reader:
        assert pack.index.codecs
        for expert in reader.read_many(keys_of(pack)):
            for key, data in parts_of(expert, pack).items():
                assert data == expected[key] == reader.read(*key)


def test_a_whole_expert_has_its_decoded_parts_on_pages(coded: Pack, expected: Parts) -> None:
    with coded.reader() as reader:
        view = bytes(reader.read(1, 2))
        for part in (GATE, DOWN):
            assert view.find(expected[1, 2, part]) % PAGE == 0
        assert expected[1, 2, UP] in view


def test_an_expert_without_such_parts_is_one_read_as_in_any_pack(tmp_path: Path) -> None:
    """Layer 1 has nothing to shorten; in layer 0 a part that is as it is lies between frames."""
    builder = compressible((0, 1))
    for spec in builder.tensors:
        if spec.name.startswith("blk.1.ffn"):
            spec.data = random.Random(spec.name).randbytes(len(spec.data))
    pack_model(write_model(tmp_path / "m", builder), tmp_path / "pack", codec="zstd")
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        blob = pack.locate(1, 0)
        assert len(reader.read(1, 0)) == blob.length
        assert (reader.statistics.read_count, reader.statistics.read_length) == (1, blob.length)
        assert pack.locate(1, 0, GATE).offset_in_blob == 0
        before = reader.statistics
        reader.read(0, 0)
        now = reader.statistics
        stored = sum(pack.locate(0, 0, part).stored_length for part in (GATE, UP, DOWN))
        assert now.read_count - before.read_count == 3
        assert stored <= now.read_length - before.read_length <= pack.locate(0, 0).length


# What the pack says


def test_locating_says_what_is_stored(coded: Pack) -> None:
    gate, up = coded.locate(0, 1, "gate"), coded.locate(0, 1, "up")
    assert (gate.codec, up.codec) == ("zstd", None)
    assert 0 < gate.stored_length < gate.length == up.length == up.stored_length
    for part in (gate, up):  # neither lies in what is read of the blob where it lies in the file
        assert part.blob_offset is None
        with pytest.raises(RequestError, match="no blob that is read as it lies"):
            _ = part.offset_in_blob
    facts = describe_blob(coded, 0, 1)
    blob = coded.locate(0, 1)
    assert (facts.path, facts.offset, facts.length) == (blob.path, blob.offset, blob.length)
    for placed, kind in zip(facts.parts, coded.parts(0), strict=True):
        where = coded.locate(0, 1, kind.name)
        assert (placed.codec, placed.stored_length) == (where.codec, where.stored_length)
        assert placed.offset_in_blob is None


def test_the_hottest_are_counted_by_what_they_take_in_memory(coded: Pack) -> None:
    length = sum(kind.length for kind in coded.parts(0))
    assert coded.hotness(0, 0).length == length > coded.locate(0, 0).length
    assert coded.hottest(2 * length) == [(0, 0), (0, 1)]
    assert coded.hottest(2 * length - 1) == [(0, 0)]
    assert coded.shape.expert_length == sum(
        4 * sum(kind.length for kind in coded.parts(layer)) for layer in (0, 1)
    )


def test_warming_brings_what_is_stored_and_decodes_nothing(
    coded: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "decompress_into", None)
    told: list[int] = []
    total = sum(coded.locate(*key).length for key in keys_of(coded))
    assert coded.warm(1 << 30, progress=told.append) == sum(told) == total


def test_nothing_of_it_is_loaded_before_it_is_needed(path: Path, packs: dict[str, Path]) -> None:
    code = """
import sys, moepack
with moepack.open(sys.argv[1]) as pack, pack.reader() as reader:
    reader.read(0, 0)
    list(reader.read_many([(0, 1), (1, 1)]))
with moepack.open(sys.argv[2]) as pack:
    pack.locate(0, 0), pack.locate(0, 0, "gate"), pack.hottest(1 << 20)
    print(sorted({"zstandard", "numpy", "concurrent.futures"} & set(sys.modules)))
    with pack.reader() as reader:
        reader.read(0, 0)
    print(sorted({"zstandard", "numpy"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(packs["qwen3moe"]), str(path)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert outcome.stdout.split("\n") == ["[]", "['zstandard']", ""]


# Threads


@pytest.fixture
def decoding_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of the threads that decode."""
    names: list[str] = []
    original = frames.decompress_into

    def noted(frame: memoryview, target: memoryview) -> None:
        names.append(threading.current_thread().name)
        original(frame, target)

    monkeypatch.setattr(frames, "decompress_into", noted)
    return names


def test_batches_and_loops_decode_in_threads_of_their_own(
    coded: Pack, decoding_threads: list[str]
) -> None:
    with coded.reader() as reader:
        list(reader.read_many(keys_of(coded)))
    count = len(decoding_threads)
    assert count == 4 * 5 + 4 * 2

    async def work() -> None:
        async with AsyncReader(coded) as reader:
            await asyncio.gather(*(reader.read(*key) for key in keys_of(coded)))

    run(work)
    assert len(decoding_threads) == 2 * count
    assert all(name.startswith("moepack-decoding") for name in decoding_threads)


def test_a_reader_leaves_no_thread_behind(coded: Pack) -> None:
    with nothing_left():
        with coded.reader(backend="buffered") as reader:
            list(reader.read_many(keys_of(coded)))
        dropped = coded.reader(backend="buffered")
        dropped.read(0, 0)
        del dropped
        gc.collect()
        deadline = time.monotonic() + 5
        while any(t.name.startswith("moepack-decoding") for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


class SlowFrames:
    """Decoding that waits for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self._decompress = frames.decompress_into
        monkeypatch.setattr(frames, "decompress_into", self)

    def __call__(self, frame: memoryview, target: memoryview) -> None:
        self.begun.set()
        assert self.go.wait(10)
        self._decompress(frame, target)


def test_a_batch_that_is_closed_writes_nowhere_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert was taken, whose parts are as they are; of the other a part is being decoded."""
    builder = compressible((0, 1))
    for spec in builder.tensors:
        if spec.name.startswith("blk.1.ffn"):
            spec.data = random.Random(spec.name).randbytes(len(spec.data))
    pack_model(write_model(tmp_path / "m", builder), tmp_path / "pack", codec="zstd")
    slow = SlowFrames(monkeypatch)
    with moepack.open(tmp_path / "pack") as pack, pack.reader(backend="buffered") as reader:
        keys = [(0, 0), (1, 0), (1, 1), (1, 2)]
        into = [{kind.name: bytearray(kind.length) for kind in pack.parts(n)} for n, _ in keys]
        batch = reader.submit(keys, into=into)
        assert [next(batch.completions()).layer for _ in range(3)] == [1, 1, 1]
        assert slow.begun.wait(5)
        closer = threading.Thread(target=batch.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive()
        assert into[0][GATE] == bytes(len(into[0][GATE]))
        slow.go.set()
        closer.join(5)
        assert not closer.is_alive()
        assert into[0][GATE] != bytes(len(into[0][GATE]))


def test_an_interruption_while_it_waits_loses_nothing(
    coded: Pack, expected: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was interrupted comes when it is asked for again."""
    slow = SlowFrames(monkeypatch)
    with coded.reader(backend="buffered") as reader, reader.submit(keys_of(coded)) as batch:
        with monkeypatch.context() as patch:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batch.completions())
        slow.go.set()
        got = {(e.layer, e.expert): parts_of(e, coded) for e in batch.completions()}
        assert sorted(got) == sorted(keys_of(coded))
        for parts in got.values():
            assert all(data == expected[key] for key, data in parts.items())


def test_an_interruption_while_it_decodes_waits_for_what_others_decode(
    coded: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write into memory that is given to somebody else afterwards."""
    finished: list[int] = []
    decompress = frames.decompress_into

    def interrupted(frame: memoryview, target: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.05)
        decompress(frame, target)
        finished.append(len(target))

    monkeypatch.setattr(frames, "decompress_into", interrupted)
    count = sum(coded.locate(0, 0, kind.name).codec is not None for kind in coded.parts(0))
    with coded.reader(backend="buffered") as reader:
        with pytest.raises(KeyboardInterrupt):
            reader.read(0, 0)
        assert len(finished) == count - 1 > 0


def test_a_loop_goes_on_while_parts_are_decoded(
    coded: Pack, expected: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowFrames(monkeypatch)

    async def work() -> None:
        async with AsyncReader(coded) as reader:
            reading = asyncio.create_task(reader.read(0, 0, GATE))
            assert await reader.read(0, 0, UP) == expected[0, 0, UP]
            while not slow.begun.is_set():
                await asyncio.sleep(0.001)
            assert await reader.read(1, 3, UP) == expected[1, 3, UP]
            assert not reading.done()
            slow.go.set()
            assert await reading == expected[0, 0, GATE]
            cancelled = asyncio.create_task(reader.read(0, 1))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled

    run(work)


def test_where_no_thread_can_be_had_the_expert_has_an_error(
    coded: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise MachineError("can't start new thread")

    with coded.reader() as reader:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPool, "submit", refused)
            with reader.submit([(0, 0), (0, 1)]) as batch:
                for _ in range(2):
                    with pytest.raises(MachineError, match="new thread"):
                        next(batch.completions())
            with pytest.raises(MachineError, match="new thread"):
                reader.read(0, 0)
        assert reader.read(0, 0, GATE)
        assert reader.statistics.in_flight_count == 0


# Damage


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "pack"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parts]:
    """Pack a model of a few hundred bytes, all of it stored by a codec; return its parts too."""
    folder = tmp_path_factory.mktemp("small")
    model = compressible((0,), experts=2, ne=(8, 8), masks={"up": 3})
    pack_model(write_model(folder / "m", model), folder / "pack", codec="zstd", alignment=8)
    with moepack.open(folder / "pack") as pack, pack.reader(backend="buffered") as reader:
        assert pack.index.codecs
        parts = {
            (layer, expert, kind.name): bytes(reader.read(layer, expert, kind.name))
            for layer, expert in keys_of(pack)
            for kind in pack.parts(layer)
        }
    return folder / "pack", parts


def test_a_flipped_bit_anywhere_never_gives_other_bytes(
    small: tuple[Path, Parts], tmp_path: Path
) -> None:
    path, parts = small
    copy = Path(shutil.copytree(path, tmp_path / "pack"))
    with moepack.open(copy) as pack, pack.reader(backend="buffered") as reader:
        assert {pack.locate(*key).codec for key in parts} == {"zstd"}
        (data_path,) = {pack.locate(*key).path for key in parts}
        places = {key: pack.locate(*key) for key in parts}
        original = data_path.read_bytes()
        with open(data_path, "r+b", buffering=0) as file:
            for at in range(len(original)):
                for bit in range(8):
                    file.seek(at)
                    file.write(bytes([original[at] ^ 1 << bit]))
                    for key, place in places.items():
                        hit = place.offset <= at < place.offset + place.stored_length
                        if not hit and (at + bit) % 16:
                            continue  # all others now and then
                        try:
                            assert reader.read(*key) == parts[key]
                        except PackError:
                            assert hit, (at, bit)
                file.seek(at)
                file.write(original[at : at + 1])


def of_other_length(data: bytes) -> bytes:
    return frames.compress(data[:-1], 3)


def without_length(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def in_two_frames(data: bytes) -> bytes:
    return frames.compress(data[:5000], 3) + frames.compress(data[5000:], 3)


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "trailing": (lambda data: frames.compress(data, 3) + b"\1", "ends 1 bytes early"),
    "cut": (lambda data: frames.compress(data, 3)[:-1], "is cut short"),
    "short": (of_other_length, "does not state 16,384 bytes of content"),
    "no length": (without_length, "does not state"),
    "two frames": (in_two_frames, "does not state"),
    "no frame": (lambda data: bytes(4000), "is none of Zstandard"),
}


def ways(pack: Pack, key: tuple[int, int], part: str) -> Iterator[Callable[[], object]]:
    """Yield each way to read a part, alone or with others of its expert."""

    def batched(**options: Any) -> object:
        with pack.reader(**options) as reader:
            return [bytes(expert.part(part)) for expert in reader.read_many([key])]

    def at_once(asked: str | None, **options: Any) -> object:
        with pack.reader(**options) as reader:
            return bytes(reader.read(*key, asked))

    async def in_loop() -> object:
        async with AsyncReader(pack) as reader:
            return bytes(await reader.read(*key))

    every: list[dict[str, str]] = [
        {},
        {"check": "never"},
        {"check": "first", "backend": "buffered"},
    ]
    for options in every:
        yield partial(batched, **options)
        yield partial(at_once, part, **options)
        yield partial(at_once, None, **options)
    yield lambda: run(in_loop)


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_frame_of_the_parts_length_is_an_error_that_names_it(
    what: str, copy: Path, expected: Parts
) -> None:
    change, problem = BROKEN[what]
    store(copy, part_number(copy, 1, 2, DOWN), change(expected[1, 2, DOWN]))
    with moepack.open(copy) as pack:
        where = pack.locate(1, 2, DOWN)
        place = f"layer 1 expert 2 {DOWN} at byte {where.offset:,}"
        for read in ways(pack, (1, 2), DOWN):
            with pytest.raises(PackError) as caught:
                read()
            assert caught.value.path == str(where.path)
            assert caught.value.place == place
            assert f"cannot be decoded: its frame {problem}" in str(caught.value)
            assert "moepack verify" in (caught.value.hint or "")


def test_a_frame_of_other_bytes_is_an_error_unless_nothing_is_checked(
    copy: Path, expected: Parts
) -> None:
    other = expected[0, 0, GATE]
    store(copy, part_number(copy, 1, 2, DOWN), frames.compress(other, 3))
    with moepack.open(copy) as pack:
        where = pack.locate(1, 2, DOWN)
        place = f"layer 1 expert 2 {DOWN} at byte {where.offset:,}"
        with pack.reader() as reader:
            for read in (lambda: reader.read(1, 2), lambda: list(reader.read_many([(1, 2)]))):
                with pytest.raises(PackError, match="do not have the digest") as caught:
                    read()
                assert (caught.value.path, caught.value.place) == (str(where.path), place)
        with pack.reader(check="never") as reader:
            assert reader.read(1, 2, DOWN) == other


def test_a_batch_goes_on_behind_a_part_that_cannot_be_decoded(copy: Path, expected: Parts) -> None:
    store(copy, part_number(copy, 0, 2, GATE), bytes(4000))
    pool = BufferPool(3, 64 << 10)
    with moepack.open(copy) as pack, pack.reader(pool=pool) as reader:
        keys = keys_of(pack)
        with reader.submit(keys) as batch:
            came, errors = [], 0
            while len(batch):
                try:
                    for expert in batch.completions():
                        came.append((expert.layer, expert.expert))
                        parts = parts_of(expert, pack)
                        assert all(parts[key] == expected[key] for key in parts)
                        expert.release()
                except PackError:
                    errors += 1
        assert sorted(came) == sorted(set(keys) - {(0, 2)})
        assert errors == reader.statistics.error_count == 1
        assert pool.free_count == 3


def test_a_file_that_is_cut_or_gone_is_named(copy: Path) -> None:
    with moepack.open(copy) as pack:
        where = pack.locate(1, 3, DOWN)
        data = where.path.read_bytes()
        where.path.write_bytes(data[: where.offset + 100])
        for read in ways(pack, (1, 3), DOWN):
            with pytest.raises(PackError, match="ends too early") as caught:
                read()
            assert DOWN in (caught.value.place or "")
        where.path.unlink()
        for read in ways(pack, (1, 3), DOWN):
            with pytest.raises(PackError, match="missing"):
                read()


def test_an_error_holds_none_of_the_memory(copy: Path) -> None:
    flip(copy / "experts-00001.bin", 5)
    with moepack.open(copy) as pack, pack.reader() as reader:
        reader.read(1, 1)
        list(reader.read_many([(1, 1)]))
        gc.collect()
        kept = reader._arena.kept_length
        assert kept
        held: list[MoepackError] = []
        for _ in range(20):
            with pytest.raises(PackError) as caught:
                list(reader.read_many([(1, 0)]))
            held.append(caught.value)
            del caught
        assert reader._arena.kept_length == kept
        assert all(re.search("digest|decoded", str(error)) for error in held)
