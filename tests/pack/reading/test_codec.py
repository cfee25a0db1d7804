"""Parts stored by zstd are read as they were packed, every way there is, or with an error."""

import contextlib
import gc
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.inspection.describe import describe_blob
from moepack.pack.reading.pack import Pack
from moepack.packing.pack_model import pack_model
from moepack.storage import frames
from moepack.storage.thread_pool import ThreadPool
from tests.support.amounts import amounts
from tests.support.children import run_child, wait_until
from tests.support.compressible import (
    compressible,
    part_number,
    store,
    with_biases,
    write_model,
)
from tests.support.models import flip, keys_of
from tests.support.reads import nothing_left
from tests.support.ways import WAYS, Reading

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


def all_parts(path: Path) -> Parts:
    """Read all parts of a pack."""
    with moepack.open(path) as pack, pack.reader() as reader:
        return {
            (layer, expert, kind.name): bytes(reader.read(layer, expert, kind.name))
            for layer, expert in keys_of(pack)
            for kind in pack.parts(layer)
        }


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Return the bytes of all parts, by a pack without a codec."""
    plain = tmp_path_factory.mktemp("plain") / "pack"
    pack_model(model, plain)
    return all_parts(plain)


@pytest.fixture
def coded(path: Path) -> Iterator[Pack]:
    with moepack.open(path) as pack:
        yield pack


def parts_of(expert: moepack.ExpertBytes, pack: Pack) -> Parts:
    """Return the bytes of the parts of an expert that was read whole."""
    return {
        (expert.layer, expert.expert, kind.name): bytes(expert.part(kind.name))
        for kind in pack.parts(expert.layer)
    }


# Every way of reading: see test_contract.py as well


def test_a_whole_expert_has_its_decoded_parts_on_pages(coded: Pack, expected: Parts) -> None:
    with coded.reader() as reader:
        for expert in reader.read_many([(0, 2), (1, 2)]):
            start = np.frombuffer(expert.view, np.uint8).ctypes.data
            for kind in coded.parts(expert.layer):
                view = expert.part(kind.name)
                assert view == expected[expert.layer, 2, kind.name]
                offset = np.frombuffer(view, np.uint8).ctypes.data - start
                if coded.locate(expert.layer, 2, kind.name).codec:
                    assert offset % PAGE == 0


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Pack a model with frames in layer 0 alone: layer 1 has nothing to shorten."""
    builder = compressible((0, 1))
    for spec in builder.tensors:
        if spec.name.startswith("blk.1.ffn"):
            spec.data = random.Random(spec.name).randbytes(len(spec.data))
    pack_model(write_model(tmp_path / "m", builder), tmp_path / "pack", codec="zstd")
    return tmp_path / "pack"


def test_an_expert_without_such_parts_is_one_read_as_in_any_pack(mixed: Path) -> None:
    """In layer 0 a part that is as it is lies between frames."""
    with moepack.open(mixed) as pack, pack.reader() as reader:
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
    lengths: list[int] = []
    total = sum(coded.locate(*key).length for key in keys_of(coded))
    assert coded.warm(1 << 30, progress=lengths.append) == sum(lengths) == total


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
    assert run_child(code, packs["qwen3moe"], path) == "[]\n['zstandard']\n"


# Threads


def test_a_reader_leaves_no_thread_behind(coded: Pack) -> None:
    with nothing_left():
        with coded.reader(backend="buffered") as reader:
            list(reader.read_many(keys_of(coded)))
        dropped = coded.reader(backend="buffered")
        dropped.read(0, 0)
        del dropped
        gc.collect()
        wait_until(lambda: not any("moepack-decoding" in t.name for t in threading.enumerate()))


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
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert was taken, whose parts are as they are; of the other a part is being decoded."""
    slow = SlowFrames(monkeypatch)
    with moepack.open(mixed) as pack, pack.reader(backend="buffered") as reader:
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
        parts_by_key = {(e.layer, e.expert): parts_of(e, coded) for e in batch.completions()}
        assert sorted(parts_by_key) == sorted(keys_of(coded))
        for parts in parts_by_key.values():
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


@pytest.mark.parametrize("bit_count", amounts(2, 8))
@pytest.mark.long
def test_a_flipped_bit_anywhere_never_gives_other_bytes(bit_count: int, tmp_path: Path) -> None:
    """In each byte of a pack of a few hundred, all of it stored by a codec, some bits, or all."""
    model = compressible((0,), experts=2, ne=(8, 8), masks={"up": 3})
    path = tmp_path / "pack"
    pack_model(write_model(tmp_path / "m", model), path, codec="zstd", alignment=8)
    parts = all_parts(path)
    with moepack.open(path) as pack, pack.reader(backend="buffered") as reader:
        for key, data in parts.items():
            where = pack.locate(*key)
            assert where.codec == "zstd"
            for at in range(where.offset, where.offset + where.stored_length):
                for bit in ((at + 3 * number) % 8 for number in range(bit_count)):
                    flip(where.path, at, 1 << bit)
                    with contextlib.suppress(PackError):
                        assert reader.read(*key) == data, (at, bit)
                    flip(where.path, at, 1 << bit)


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: frames.compress(data, 3)[:-1], "is cut short"),
    "short": (lambda data: frames.compress(data[:-1], 3), "does not state 16,384 bytes of content"),
    "no frame": (lambda data: bytes(4000), "is none of Zstandard"),
}


def assert_named(pack: Pack, problem: str, **options: Any) -> None:
    """Read three experts in every way: the error names DOWN of the second, and the others come."""
    where = pack.locate(1, 2, DOWN)
    for way, read in WAYS.items():
        for parts in (None, (DOWN,)):
            reading = Reading(pack, [(1, 1), (1, 2), (1, 0)], parts, options=options)
            read(reading)
            (error,) = reading.errors
            assert isinstance(error, PackError), way
            assert (error.path, problem in str(error)) == (str(where.path), True), way
            assert f"layer 1 expert 2 {DOWN} at byte {where.offset:,}" == error.place, way
            assert sorted(reading.experts) == [0, 2], way
            assert reading.statistics is not None
            assert reading.statistics.error_count == 1


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_frame_is_an_error_that_names_it(what: str, copy: Path, expected: Parts) -> None:
    change, problem = BROKEN[what]
    store(copy, part_number(copy, 1, 2, DOWN), change(expected[1, 2, DOWN]))
    with moepack.open(copy) as pack:
        for check in ("always", "never"):
            assert_named(pack, f"cannot be decoded: its frame {problem}", check=check)


def test_a_frame_of_other_bytes_is_an_error_unless_nothing_is_checked(
    copy: Path, expected: Parts
) -> None:
    other = expected[0, 0, GATE]
    store(copy, part_number(copy, 1, 2, DOWN), frames.compress(other, 3))
    with moepack.open(copy) as pack:
        assert_named(pack, "do not have the digest")
        with pack.reader(check="never") as reader:
            assert reader.read(1, 2, DOWN) == other
