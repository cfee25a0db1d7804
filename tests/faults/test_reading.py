"""Errors while reading: named to the byte, and never of more than one read."""

import contextlib
import errno
import gc
import itertools
import mmap
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError
from moepack.pack.reading.open_work import close_orphans
from moepack.pack.reading.pack import Pack
from moepack.storage import aligned_read, threaded
from moepack.storage.backend import Completion, ReadRequest
from tests.support.children import PATIENCE, in_threads, run_child, within
from tests.support.faulty_backend import (
    Fault,
    FaultyBackend,
    fault_at,
    make,
    require,
)
from tests.support.interruptions import before_each, fail_at
from tests.support.models import flip, keys_of, on_disk, reads_right
from tests.support.reads import descriptors

HINT_EIO = "the drive or its connection fails: see the kernel's log, then run `moepack verify`"


def open_descriptors() -> set[str]:
    """Return the open descriptors, without those of other tests' dropped readers."""
    gc.collect()
    close_orphans()
    return descriptors()


def take_all(batch: moepack.Batch, *, in_order: bool) -> tuple[list[int], list[MoepackError]]:
    """Take all of a batch, going on after each error; give the numbers and the errors."""
    numbers: list[int] = []
    errors: list[MoepackError] = []
    while len(batch):
        try:
            for one in batch.completions(in_order=in_order):
                numbers.append(one.number)
                one.release()
        except MoepackError as error:
            errors.append(error)
    return numbers, errors


# One read that fails


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EIO, HINT_EIO),
        (errno.ENOMEM, "free memory, or raise the limits on it (ulimit -v, ulimit -l)"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ENFILE, "the system's table of open files is full: end other programs"),
        (errno.EINVAL, "the file system refuses such a direct read: use `backend=buffered`"),
        (errno.EACCES, None),
    ],
)
def test_what_the_system_says_is_passed_on_with_the_place(
    pack: Pack, code: int, hint: str | None
) -> None:
    where = pack.locate(1, 7, "up")
    backend = FaultyBackend(make("buffered"), fault_at(pack, 1, 7, "up", code=code, times=1))
    before = open_descriptors()
    with pack.reader(backend=backend) as reader:
        with pytest.raises(MachineError) as caught:
            reader.read(1, 7, "up")
        place = f"layer 1 expert 7 {where.part} at byte {where.offset:,}"
        assert str(caught.value) == f"{where.path}: {place}: cannot read: {os.strerror(code)}"
        assert caught.value.hint == hint
        assert (caught.value.path, caught.value.place) == (str(where.path), place)
        reads_right(pack, reader, errors=1)
    assert open_descriptors() == before


def test_a_read_of_joined_parts_names_them_all(packs: dict[str, Path], name: str) -> None:
    with moepack.open(packs["gpt-oss"]) as pack:
        first, last = pack.locate(0, 5, "gate"), pack.locate(0, 5, "down.bias")
        names = {last: last.part, first: "ffn_gate_exps.weight and ffn_up_exps.weight"}
        backend = FaultyBackend(make(name))
        with pack.reader(backend=backend) as reader:
            for where, parts in names.items():
                backend.faults = [fault_at(pack, 0, 5, where.part, code=errno.EIO, times=1)]
                place = f"layer 0 expert 5 {re.escape(parts)} at byte {where.offset:,}: cannot read"
                with pytest.raises(MachineError, match=place):
                    list(reader.read_many([(0, 5)], parts=("up", "gate", "down.bias")))
            (one,) = reader.read_many([(0, 5)], parts=("up", "gate", "down.bias"))
            assert one.part("down.bias") == on_disk(last)
            reads_right(pack, reader, errors=2)


def test_padding_is_not_judged_and_unchecked_reads_are_not_either(
    pack_copy: Path, name: str
) -> None:
    with moepack.open(pack_copy) as pack:
        gate = pack.locate(0, 6, "gate")
        flip(gate.path, gate.offset + gate.length)
        flip(gate.path, pack.locate(0, 7).offset)
        with (
            pack.reader(backend=name) as checked,
            pack.reader(backend=name, check="never") as unchecked,
        ):
            assert checked.read(0, 6)[gate.length] == 1
            (one,) = checked.read_many([(0, 6)], parts=("gate", "up"))
            assert one.part("gate") == on_disk(gate)
            assert unchecked.read(0, 7) == on_disk(pack.locate(0, 7))
            (one,) = unchecked.read_many([(0, 7)])
            assert one.view == on_disk(pack.locate(0, 7))
            with pytest.raises(PackError, match="digest"):
                checked.read(0, 7, "gate")
            assert checked.read(0, 7, "up") == on_disk(pack.locate(0, 7, "up"))
            reads_right(pack, checked, (0, 7), errors=1)


# Files that change under a reader


def test_a_file_that_is_cut_and_mended_reads_on(pack_copy: Path, name: str) -> None:
    with moepack.open(pack_copy) as pack, pack.reader(backend=name) as reader:
        where = pack.locate(1, 15)
        whole = where.path.read_bytes()
        # A cut inside a page, one on a page, one before the blob.
        for left in (10, 8192, 0, -4096):
            os.truncate(where.path, where.offset + left)
            message = f"expected {where.length:,} bytes, found {max(0, left):,}"
            with pytest.raises(PackError, match=f"layer 1 expert 15 blob at byte .*{message}"):
                reader.read(1, 15)
            with pytest.raises(PackError, match=f"layer 1 expert 15 blob at byte .*{message}"):
                list(reader.read_many([(1, 0), (1, 15)]))
            with open(where.path, "r+b") as file:
                file.write(whole)
            assert reader.read(1, 15) == on_disk(where)
        assert reader.statistics.read_length % where.length
        reads_right(pack, reader, errors=8)


def test_a_file_replaced_or_removed_while_open_reads_on_as_it_was(
    pack_copy: Path, name: str
) -> None:
    with moepack.open(pack_copy) as pack:
        expected = on_disk(pack.locate(1, 4))
        path = pack.locate(1, 4).path
        with pack.reader(backend=name) as reader:
            reader.read(1, 0)
            path.unlink()
            for _ in range(2):
                assert reader.read(1, 4) == expected
                (one,) = reader.read_many([(1, 4)])
                assert one.view == expected
                path.write_bytes(bytes(1 << 20))
        with pack.reader(backend=name) as reader, pytest.raises(PackError, match="digest"):
            reader.read(1, 4)


# In a batch


def test_experts_that_fail_raise_in_their_turn(pack: Pack) -> None:
    keys = [(n % 2, n) for n in range(6)]
    faults = [fault_at(pack, *keys[n], code=errno.EIO) for n in (0, 3, 5)]
    with (
        pack.reader(backend=FaultyBackend(make("buffered"), *faults), depth=4) as reader,
        reader.submit(keys) as batch,
    ):
        order: list[int | str] = []
        while left := len(batch):
            try:
                order.append(next(batch.completions(in_order=True)).number)
            except MachineError as error:
                order.append(str(error.place).partition(" blob")[0])
            assert len(batch) == left - 1, "an error is one expert's"
        assert list(batch.completions()) == []
        assert order == ["layer 0 expert 0", 1, 2, "layer 1 expert 3", 4, "layer 1 expert 5"]


def test_one_expert_of_several_reads_raises_once(packs: dict[str, Path], name: str) -> None:
    """Both of its reads fail, and it is one error; its buffer comes back when both have ended."""
    late = threading.Event()
    pool = moepack.BufferPool(1, 1 << 16)
    with moepack.open(packs["gpt-oss"]) as pack:
        backend = FaultyBackend(
            make(name),
            fault_at(pack, 0, 1, "gate", code=errno.EIO),
            fault_at(pack, 0, 1, "down", code=errno.EMFILE, until=late),
        )
        with pack.reader(backend=backend, pool=pool) as reader:
            with reader.submit([(0, 1), (0, 2)], parts=("gate", "down")) as batch:
                assert pool.free_count == 0
                threading.Timer(0.05, late.set).start()
                numbers, errors = take_all(batch, in_order=False)
            assert numbers == [1]
            assert [error.place for error in errors] == [
                f"layer 0 expert 1 ffn_gate_exps.weight at byte {pack.locate(0, 1).offset:,}"
            ]
            assert pool.free_count == 1
            assert reader.statistics.error_count == 2
            reads_right(pack, reader, (0, 1), errors=2)


def test_read_many_ends_with_its_error_and_gives_all_buffers_back(pack: Pack, name: str) -> None:
    pool = moepack.BufferPool(3, 1 << 16)
    backend = FaultyBackend(make(name), fault_at(pack, 0, 3, code=errno.EIO, times=1))
    with pack.reader(backend=backend, pool=pool) as reader:
        numbers = []
        many = reader.read_many([(0, n) for n in range(8)])
        for _ in range(3):
            with next(many) as one:
                numbers.append(one.number)
        with pytest.raises(MachineError, match="layer 0 expert 3"):
            next(many)
        assert list(many) == []
        assert numbers == [0, 1, 2]
        assert pool.free_count == 3
        reads_right(pack, reader, errors=1)


def test_a_failed_read_keeps_no_memory(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 3, code=errno.EIO))
    gc.collect()
    gc.disable()
    try:
        with pack.reader(backend=backend) as reader:
            memory = mmap.mmap(-1, 1 << 16)
            with contextlib.suppress(MachineError):
                reader.read_into(memory, 0, 3)
            memory.close()
            memory = mmap.mmap(-1, 1 << 16)
            with contextlib.suppress(MachineError):
                list(reader.read_many([(0, 3)], into=[memory]))
            memory.close()
    finally:
        gc.enable()


# Closed readers and batches


def test_a_closed_reader_refuses_every_call(pack: Pack, name: str) -> None:
    reader = pack.reader(backend=name)
    many = reader.read_many([(0, 0)])
    reader.close()
    calls: list[Callable[[], object]] = [
        lambda: reader.read(0, 0),
        lambda: reader.read(0, 0, "up"),
        lambda: reader.read_into(bytearray(1 << 16), 0, 0),
        lambda: reader.submit([(0, 0)]),
        lambda: reader.submit([]),
        lambda: next(reader.read_many([(0, 0)])),
        lambda: next(many),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="the reader is closed"):
            call()
    with pack.reader(backend=name) as again:
        reads_right(pack, again)


@pytest.mark.parametrize("in_order", [True, False])
def test_closing_the_reader_ends_a_batch_under_way(pack: Pack, name: str, in_order: bool) -> None:
    pool = moepack.BufferPool(6, 1 << 16)
    before = open_descriptors()
    backend = FaultyBackend(make(name), Fault(delay=0.005))
    reader = pack.reader(backend=backend, pool=pool, depth=2)
    batch = reader.submit(keys_of(pack))
    first = next(batch.completions(in_order=in_order))
    reader.close()
    assert backend.is_closed
    assert pool.free_count == 5
    for _ in range(2):
        with pytest.raises(RequestError, match="closed"):
            next(batch.completions(in_order=in_order))
    assert len(batch) == 0
    assert first.view == on_disk(pack.locate(first.layer, first.expert))
    first.release()
    batch.close()
    assert pool.free_count == 6
    assert len(backend.begun) <= 4
    assert open_descriptors() == before


def test_a_closed_batch_says_so_and_a_finished_one_just_ends(pack: Pack, name: str) -> None:
    pool = moepack.BufferPool(4, 1 << 16)
    with pack.reader(backend=name, pool=pool) as reader:
        with reader.submit([(0, n) for n in range(4)]) as batch:
            for one in itertools.islice(batch.completions(), 2):
                one.release()
        batch.close()
        assert pool.free_count == 4
        with pytest.raises(RequestError, match="the batch was closed before all of it was taken"):
            next(batch.completions())
        with reader.submit([(0, 0)]) as batch:
            for one in batch.completions():
                one.release()
        assert list(batch.completions()) == []
        reads_right(pack, reader)


def test_closing_in_one_thread_while_others_read(pack: Pack, name: str) -> None:
    """Each read either gives the right bytes or says that the reader is closed."""
    before = open_descriptors()
    keys = keys_of(pack)
    expected = {key: on_disk(pack.locate(*key)) for key in keys}
    reader = pack.reader(backend=FaultyBackend(make(name)), depth=3)
    begun = threading.Barrier(5)

    def work(seed: int) -> None:
        choice = random.Random(seed)
        begun.wait(PATIENCE)
        if not seed:
            time.sleep(0.03)
            reader.close()
            return

        def read_on() -> None:
            while True:
                some = choice.choices(keys, k=6)
                if seed % 2:
                    assert reader.read(*some[0]) == expected[some[0]]
                for one in reader.read_many(some, in_order=bool(seed % 4)):
                    assert one.view == expected[some[one.number]]

        with pytest.raises(RequestError, match="closed"):
            read_on()

    in_threads(5, work)
    assert reader.statistics.in_flight_count == 0
    assert open_descriptors() == before


def test_closing_wakes_a_thread_that_waits_for_a_batch(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate))
    reader = pack.reader(backend=backend, depth=1)
    batch = reader.submit([(0, 1), (0, 2), (0, 3)])
    outcomes: list[str] = []

    def collect() -> None:
        try:
            outcomes.extend(str(one.number) for one in batch.completions())
        except RequestError as error:
            outcomes.append(str(error))

    taker = threading.Thread(target=collect, daemon=True)
    taker.start()
    time.sleep(0.02)
    closer = threading.Thread(target=reader.close, daemon=True)
    closer.start()
    time.sleep(0.02)
    gate.set()
    closer.join(PATIENCE)
    taker.join(PATIENCE)
    assert not closer.is_alive()
    assert not taker.is_alive()
    assert outcomes[:-1] in ([], ["0"])
    assert "closed" in outcomes[-1]
    assert len(backend.begun) == 1


# Buffers and pools


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(36863), "the buffer does not fit, expected 36,864 writable bytes, found 36,863"),
        (bytes(36864), "expected 36,864 writable bytes, found a read-only one"),
        (np.zeros(80000, np.uint8)[::2], "not a contiguous buffer"),
        (np.zeros(36864, "M8[s]"), "not a contiguous buffer"),
        (np.array([None] * 8), "cannot read into a buffer of Python objects"),
        ("a text", "not a contiguous buffer .*bytes-like"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_read(
    pack: Pack, buffer: Any, message: str
) -> None:
    backend = FaultyBackend(make("buffered"))
    place = rf"layer 0 expert 3 blob at byte {pack.locate(0, 3).offset:,}: .*"
    with pack.reader(backend=backend) as reader:
        with pytest.raises(RequestError, match=place + message):
            reader.read_into(buffer, 0, 3)
        with pytest.raises(RequestError, match=place + message):
            reader.submit([(0, 2), (0, 3)], into=[bytearray(1 << 16), buffer])
        with pytest.raises(RequestError, match=message):
            list(reader.read_many([(0, 3)], into=[buffer]))
        assert backend.begun == []
        reads_right(pack, reader, errors=0)


def test_a_pool_that_is_too_small_is_refused_before_anything_is_read(pack: Pack) -> None:
    pool = moepack.BufferPool(2, 36864)
    backend = FaultyBackend(make("buffered"))
    with pack.reader(backend=backend, pool=pool) as reader:
        large = next(key for key in keys_of(pack) if pack.locate(*key).length > 36864)
        where = pack.locate(*large)
        with pytest.raises(RequestError) as caught:
            reader.submit([(0, 0), large])
        assert str(caught.value) == (
            f"layer {large[0]} expert {large[1]} blob at byte {where.offset:,}: the pool's buffers "
            f"are too small, expected {where.length:,} bytes, found 36,864"
        )
        assert backend.begun == []
        assert pool.free_count == 2
        assert reader.read(*large) == on_disk(where)
        (one,) = reader.read_many([large], parts=("up",))
        one.release()
        assert pool.free_count == 2


@pytest.mark.parametrize("in_order", [True, False])
def test_an_empty_pool_is_an_error_that_passes(pack: Pack, name: str, in_order: bool) -> None:
    keys = [(0, n) for n in range(6)]
    pool = moepack.BufferPool(2, 1 << 16)
    with pack.reader(backend=name, pool=pool) as reader, reader.submit(keys) as batch:
        experts = list(itertools.islice(batch.completions(in_order=in_order), 2))
        assert pool.free_count == 0
        for _ in range(2):
            with pytest.raises(RequestError, match="all buffers of the pool are taken") as caught:
                next(batch.completions(in_order=in_order))
            assert caught.value.hint == "release what was read before, or make the pool larger"
        assert len(batch) == 4
        for one in experts:
            assert one.view == on_disk(pack.locate(0, one.expert))
            one.release()
        numbers, errors = take_all(batch, in_order=in_order)
        assert sorted([*numbers, *(one.number for one in experts)]) == list(range(6))
        assert errors == []
        assert pool.free_count == 2
        reads_right(pack, reader, errors=0)


def test_a_pool_takes_back_only_what_it_gave_and_once() -> None:
    pool = moepack.BufferPool(2, 5000)
    first, second = pool.take(4000), pool.take(5000)
    assert first is not None
    assert second is not None
    assert (len(first), len(second), pool.free_count) == (4000, 5000, 0)
    assert pool.take(1) is None
    for view in (first, second):
        assert np.frombuffer(view, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    first[:], second[:] = b"1" * 4000, b"2" * 5000
    assert bytes(first) == b"1" * 4000
    for stranger in (first[:10], memoryview(bytearray(4000)), memoryview(first)):
        with pytest.raises(RequestError, match="the buffer was not taken from this pool"):
            pool.give_back(stranger)
    pool.give_back(first)
    with pytest.raises(RequestError, match="was not taken"):
        pool.give_back(first)
    assert pool.free_count == 1
    again = pool.take(5000)
    assert again is not None
    assert len(again) == 5000
    pool.give_back(again)
    pool.give_back(second)
    assert pool.free_count == 2


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_a_pool_of_nothing_is_refused(count: int, length: int) -> None:
    with pytest.raises(RequestError, match=r"not a pool, expected .*, found \("):
        moepack.BufferPool(count, length)


@pytest.mark.parametrize("length", [1 << 62, 1 << 80])
def test_a_pool_that_memory_cannot_hold_is_the_machines_fault(length: int) -> None:
    with pytest.raises(MachineError, match="cannot allocate"):
        moepack.BufferPool(2, length)


# Memory and descriptors that run out


@pytest.mark.parametrize("direct", ["direct", "uring"])
def test_memory_that_cannot_be_had_for_the_ends_of_a_read_is_one_experts_error(
    packs: dict[str, Path], direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is no whole number of blocks needs a block of the backend's own."""
    require(direct, packs["gpt-oss"])
    no_memory = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=direct) as made:
        parts = [pack.locate(0, n, "up") for n in range(3)]
        assert parts[0].length % 512
        into = [mmap.mmap(-1, part.length) for part in parts]
        for failing in range(3):
            fail_at(monkeypatch, failing + 1, no_memory, (aligned_read, "map_memory"))
            with made.submit([(0, 0), (0, 1), (0, 2)], parts="up", into=into) as batch:
                numbers, errors = within(lambda: take_all(batch, in_order=True))
            assert len(numbers) == 2
            (place,) = (str(error.place) for error in errors)
            assert re.fullmatch(rf"layer 0 expert \d {parts[0].part} at byte [\d,]+", place)
            monkeypatch.undo()
        reads_right(pack, made, errors=3)


# Queues that cannot be made


def test_a_queue_that_cannot_be_made_is_the_machines_fault(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"), queue_codes=[errno.ENOMEM, errno.EMFILE])
    pool = moepack.BufferPool(4, 1 << 16)
    with pack.reader(backend=backend, pool=pool) as made:
        for _ in range(2):
            message = "cannot set up buffered: (Cannot allocate memory|Too many open files)"
            with pytest.raises(MachineError, match=message) as caught:
                made.submit(keys_of(pack)[:3])
            assert "use fewer threads" in str(caught.value.hint)
            del caught
            gc.collect()
        assert made.statistics.in_flight_count == 0
        assert pool.free_count == 4
        reads_right(pack, made)


# Reads that dawdle and overtake each other


@pytest.mark.parametrize("seed", range(3))
def test_in_order_is_in_order_however_reads_end(pack: Pack, name: str, seed: int) -> None:
    choice = random.Random(seed)
    keys = keys_of(pack)
    choice.shuffle(keys)

    def shuffle(completions: list[Completion]) -> None:
        choice.shuffle(completions)

    backend = FaultyBackend(make(name), shuffle=shuffle)
    with pack.reader(backend=backend, depth=7) as made:
        assert [one.number for one in made.read_many(keys)] == list(range(len(keys)))
        numbers = [one.number for one in made.read_many(keys, in_order=False)]
        assert sorted(numbers) == list(range(len(keys)))
        assert numbers != sorted(numbers)
        reads_right(pack, made, errors=0)


def test_both_orders_may_be_asked_of_one_batch(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), fault_at(pack, 0, 0, until=gate))
    with pack.reader(backend=backend) as made, made.submit([(0, n) for n in range(6)]) as batch:
        first = [one.number for one in itertools.islice(batch.completions(), 3)]
        assert 0 not in first
        gate.set()
        rest = [one.number for one in batch.completions(in_order=True)]
        assert rest == [n for n in range(6) if n not in first]


def test_a_single_read_is_never_held_back(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate, times=1))
    with pack.reader(backend=backend, depth=1, max_in_flight=1) as made:
        batch = made.submit([(0, 0), (0, 1)])
        assert within(lambda: made.read(0, 2)) == on_disk(pack.locate(0, 2))
        assert made.statistics.in_flight_count == 1
        gate.set()
        assert len(list(batch.completions())) == 2


def test_threads_that_share_a_batch_all_come_to_its_end(pack: Pack) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make("buffered"), Fault(until=gate))
    outcomes: list[int] = []
    with pack.reader(backend=backend) as made, made.submit([(0, 0)]) as batch:

        def work(_: int) -> None:
            outcomes.append(len(list(batch.completions())))

        threading.Timer(0.05, gate.set).start()
        in_threads(2, work)
    assert sorted(outcomes) == [0, 1]


# Threads of the buffered and direct backends


def test_no_thread_writes_to_the_descriptors_of_a_closed_queue(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may be another file's by then."""
    problems: list[str] = []
    before_each(monkeypatch, lambda *_: time.sleep(0.05), (threaded._Signal, "set"))
    monkeypatch.setattr(threading, "excepthook", lambda hook: problems.append(str(hook.exc_value)))
    backend = make("buffered")
    queue = backend.queue(1)
    queue.fileno()
    where = pack.locate(0, 0)
    request = ReadRequest(where.path, where.offset, memoryview(bytearray(where.length)))
    queue.start([(0, request)])
    assert len(queue.finished(wait=True)) == 1
    queue.close()
    time.sleep(0.1)
    backend.close()
    assert problems == []


def test_a_program_that_ends_with_reads_in_flight_ends(packs: dict[str, Path]) -> None:
    # A drive that is slow, and a batch that is still a global when the interpreter stops.
    code = """
        import os, sys, time, moepack
        # In a namespace of its own, or the function would keep this one alive.
        drive = {"sleep": time.sleep, "read": os.preadv}
        exec("def slow(*all): sleep(0.1); return read(*all)", drive)
        pack = moepack.open(sys.argv[1])
        reader = pack.reader(backend="buffered")
        os.preadv = drive["slow"]
        batch = reader.submit([(0, n) for n in range(8)])
        time.sleep(0.05)
    """
    run_child(code, packs["qwen3moe"])


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_reader_that_ends_leaves_no_threads_and_no_files(
    pack: Pack, name: str, is_closed: bool
) -> None:
    before = threading.active_count(), descriptors()
    reader = pack.reader(backend=name, depth=8)
    list(reader.read_many(keys_of(pack)))
    if is_closed:
        reader.close()
    del reader
    assert (threading.active_count(), descriptors()) == before
