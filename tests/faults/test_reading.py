"""What goes wrong while reading: named to the byte, and never more than one read's worth of it."""

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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import moepack
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.reading.open_work import close_orphans
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader
from moepack.storage import aligned_read, buffers, threaded
from moepack.storage.arena import Arena
from moepack.storage.backend import Completion, ReadRequest
from tests.support.children import PATIENCE, run_child, within
from tests.support.faulty_backend import (
    Fault,
    FaultyBackend,
    fail_allocation,
    fault_at,
    make,
    require,
)
from tests.support.models import flip, keys_of, on_disk

HINT_EIO = "the drive or its connection fails: see the kernel's log, then run `moepack verify`"


def the_rest_reads_right(
    pack: Pack, reader: Reader, *without: tuple[int, int], errors: int | None = None
) -> None:
    """Read all other experts one by one and together, and look at the statistics."""
    keys = [key for key in keys_of(pack) if key not in without]
    for key in keys[::5]:
        assert reader.read(*key) == on_disk(pack.locate(*key))
    for in_order in (True, False):
        for one in reader.read_many(keys, in_order=in_order):
            assert one.view == on_disk(pack.locate(*keys[one.number]))
            one.release()
    now = reader.statistics
    assert (now.in_flight_count, now.in_flight_length) == (0, 0)
    if errors is not None:
        assert now.error_count == errors


def open_descriptors() -> int:
    """Count what is open, without what dropped readers of other tests have left."""
    gc.collect()
    close_orphans()
    return len(os.listdir("/proc/self/fd"))


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
        (errno.EINVAL, 'the file system refuses such a direct read: use backend="buffered"'),
        (errno.EACCES, None),
    ],
)
def test_what_the_system_says_is_passed_on_with_the_place(
    pack: Pack, name: str, code: int, hint: str | None
) -> None:
    where, part = pack.locate(0, 5), pack.locate(1, 7, "up")
    backend = FaultyBackend(
        make(name),
        fault_at(pack, 0, 5, code=code, times=3),
        fault_at(pack, 1, 7, "up", code=code, times=1),
    )
    descriptors = open_descriptors()
    with pack.reader(backend=backend) as reader:
        reads: list[Callable[[], object]] = [
            lambda: reader.read(0, 5),
            lambda: reader.read_into(bytearray(where.length), 0, 5),
            lambda: list(reader.read_many([(0, 4), (0, 5)])),
        ]
        for read in reads:
            with pytest.raises(MachineError) as caught:
                read()
            place = f"layer 0 expert 5 blob at byte {where.offset:,}"
            assert str(caught.value) == f"{where.path}: {place}: cannot read: {os.strerror(code)}"
            assert caught.value.hint == hint
            assert (caught.value.path, caught.value.place) == (str(where.path), place)
        assert reader.statistics.error_count == 3
        assert reader.read(0, 5) == on_disk(where)
        with pytest.raises(
            MachineError, match=f"layer 1 expert 7 {part.part} at byte {part.offset:,}"
        ):
            reader.read(1, 7, "up")
        the_rest_reads_right(pack, reader, errors=4)
    assert backend.is_closed
    assert open_descriptors() == descriptors


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
            the_rest_reads_right(pack, reader, errors=2)


def test_a_short_read_says_how_much_there_was(pack: Pack, name: str) -> None:
    where = pack.locate(1, 3)
    backend = FaultyBackend(make(name), fault_at(pack, 1, 3, missing=100))
    with pack.reader(backend=backend, check="never") as reader:
        for read in (lambda: reader.read(1, 3), lambda: list(reader.read_many([(1, 3)]))):
            with pytest.raises(PackError) as caught:
                read()
            place = f"layer 1 expert 3 blob at byte {where.offset:,}"
            found = f"expected {where.length:,} bytes, found {where.length - 100:,}"
            problem = f"{where.path}: {place}: the file ends too early, {found}"
            assert str(caught.value) == problem
            assert "it was cut or replaced" in str(caught.value.hint)
        assert reader.statistics.read_length == 2 * (where.length - 100)
        the_rest_reads_right(pack, reader, (1, 3), errors=2)


def test_a_flipped_bit_names_the_part_and_both_digests(pack: Pack, name: str) -> None:
    up = pack.locate(0, 2, "up")
    flips = [
        fault_at(pack, 0, 2, flip=up.offset_in_blob + 5, times=2),
        fault_at(pack, 0, 2, "up", flip=0, times=1),
    ]
    backend = FaultyBackend(make(name), *flips)
    with pack.reader(backend=backend) as reader:
        for parts in (None, ("up", "gate"), ("up", "down")):
            with pytest.raises(PackError) as caught:
                list(reader.read_many([(0, 2)], parts=parts))
            place = (
                rf"layer 0 expert 2 ffn_up_exps\.weight at byte {up.offset:,}: the bytes do not "
            )
            digests = rf"expected xxh3:{up.digest:016x}, found xxh3:[0-9a-f]{{16}}\Z"
            assert re.search(place, str(caught.value))
            assert re.search(digests, str(caught.value))
            assert caught.value.hint == "run `moepack verify` on the pack"
        the_rest_reads_right(pack, reader)


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
            the_rest_reads_right(pack, checked, (0, 7), errors=1)


# Files that change under a reader


def test_a_file_that_is_cut_and_mended_reads_on(pack_copy: Path, name: str) -> None:
    with moepack.open(pack_copy) as pack, pack.reader(backend=name) as reader:
        where = pack.locate(1, 15)
        whole = where.path.read_bytes()
        # A cut inside a page, one on a page, one before the blob.
        for left in (10, 8192, 0, -4096):
            os.truncate(where.path, where.offset + left)
            found = f"expected {where.length:,} bytes, found {max(0, left):,}"
            with pytest.raises(PackError, match=f"layer 1 expert 15 blob at byte .*{found}"):
                reader.read(1, 15)
            with pytest.raises(PackError, match=f"layer 1 expert 15 blob at byte .*{found}"):
                list(reader.read_many([(1, 0), (1, 15)]))
            with open(where.path, "r+b") as file:
                file.write(whole)
            assert reader.read(1, 15) == on_disk(where)
        the_rest_reads_right(pack, reader, errors=8)


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


def test_a_missing_file_is_named_and_found_again(pack_copy: Path, name: str) -> None:
    with moepack.open(pack_copy) as pack, pack.reader(backend=name) as reader:
        path = pack.locate(1, 4).path
        path.rename(path.with_suffix(".away"))
        message = rf"\A{re.escape(str(path))}: layer 1 expert 4 blob at byte [\d,]+: a data file is"
        with pytest.raises(PackError, match=message):
            reader.read(1, 4)
        with reader.submit([(1, 4), (0, 1), (1, 5)]) as batch:
            numbers, errors = take_all(batch, in_order=True)
        assert numbers == [1]
        assert ["missing" in str(error) for error in errors] == [True, True]
        path.with_suffix(".away").rename(path)
        the_rest_reads_right(pack, reader, errors=3)


# In a batch


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("has_pool", [True, False])
def test_experts_that_fail_raise_in_their_turn_and_the_rest_comes(
    pack: Pack, name: str, in_order: bool, has_pool: bool
) -> None:
    keys = [(n % 2, n) for n in range(10)]
    backend = FaultyBackend(
        make(name),
        fault_at(pack, *keys[0], code=errno.EIO),
        fault_at(pack, *keys[4], missing=1),
        fault_at(pack, *keys[7], flip=0),
        fault_at(pack, *keys[9], code=errno.ENOMEM),
    )
    pool = moepack.BufferPool(3, 1 << 16) if has_pool else None
    with pack.reader(backend=backend, depth=4, pool=pool) as reader:
        with reader.submit(keys) as batch:
            order: list[int | str] = []
            while len(batch):
                left = len(batch)
                try:
                    for one in batch.completions(in_order=in_order):
                        order.append(one.number)
                        assert one.view == on_disk(pack.locate(*keys[one.number]))
                        one.release()
                        left = len(batch)
                except MoepackError as error:
                    order.append(str(error.place).partition(" at")[0])
                    assert len(batch) == left - 1, "an error is one expert's"
            assert list(batch.completions()) == []
        expected = [
            *("layer 0 expert 0 blob", 1, 2, 3, "layer 0 expert 4 blob", 5, 6),
            *("layer 1 expert 7 ffn_gate_exps.weight", 8, "layer 1 expert 9 blob"),
        ]
        if in_order:
            assert order == expected
        assert sorted(map(str, order)) == sorted(map(str, expected))
        assert reader.statistics.error_count == 4
        assert pool is None or pool.free_count == 3
        the_rest_reads_right(pack, reader, *(keys[n] for n in (0, 4, 7, 9)), errors=4)


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
            the_rest_reads_right(pack, reader, (0, 1), errors=2)


def test_read_many_ends_with_its_error_and_gives_all_buffers_back(pack: Pack, name: str) -> None:
    pool = moepack.BufferPool(3, 1 << 16)
    backend = FaultyBackend(make(name), fault_at(pack, 0, 3, code=errno.EIO, times=1))
    with pack.reader(backend=backend, pool=pool) as reader:
        got = []
        many = reader.read_many([(0, n) for n in range(8)])
        for _ in range(3):
            with next(many) as one:
                got.append(one.number)
        with pytest.raises(MachineError, match="layer 0 expert 3"):
            next(many)
        assert list(many) == []
        assert got == [0, 1, 2]
        assert pool.free_count == 3
        the_rest_reads_right(pack, reader, errors=1)


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


def test_a_batch_dropped_after_an_error_gives_its_buffers_back(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 3, code=errno.EIO))
    pool = moepack.BufferPool(3, 1 << 16)
    gc.collect()
    gc.disable()
    try:
        with pack.reader(backend=backend, pool=pool) as reader:
            batch = reader.submit([(0, 3), (0, 4), (0, 5)])
            with contextlib.suppress(MachineError):
                next(batch.completions(in_order=True))
            del batch
            assert reader.statistics.in_flight_count == 0  # a call, which closes it
            assert pool.free_count == 3
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
        the_rest_reads_right(pack, again)


@pytest.mark.parametrize("in_order", [True, False])
def test_closing_the_reader_ends_a_batch_under_way(pack: Pack, name: str, in_order: bool) -> None:
    pool = moepack.BufferPool(6, 1 << 16)
    descriptors = open_descriptors()
    backend = FaultyBackend(make(name), Fault(delay=0.005))
    reader = pack.reader(backend=backend, pool=pool, depth=2)
    batch = reader.submit(keys_of(pack))
    taken = next(batch.completions(in_order=in_order))
    reader.close()
    assert backend.is_closed
    assert pool.free_count == 5
    for _ in range(2):
        with pytest.raises(RequestError, match="closed"):
            next(batch.completions(in_order=in_order))
    assert len(batch) == 0
    assert taken.view == on_disk(pack.locate(taken.layer, taken.expert))
    taken.release()
    batch.close()
    assert pool.free_count == 6
    assert len(backend.begun) <= 4
    assert open_descriptors() == descriptors


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
        the_rest_reads_right(pack, reader)


def test_closing_in_one_thread_while_others_read(pack: Pack, name: str) -> None:
    """Each read either gives the right bytes or says that the reader is closed."""
    descriptors = open_descriptors()
    keys = keys_of(pack)
    expected = {key: on_disk(pack.locate(*key)) for key in keys}
    for _ in range(3):
        reader = pack.reader(backend=FaultyBackend(make(name)), depth=3)
        outcomes: list[str] = []
        begun = threading.Barrier(5)

        def work(seed: int, reader: Reader, outcomes: list[str], begun: threading.Barrier) -> None:
            choice = random.Random(seed)
            begun.wait(PATIENCE)
            try:
                while True:
                    some = choice.choices(keys, k=6)
                    if seed % 2:
                        assert reader.read(*some[0]) == expected[some[0]]
                    else:
                        for one in reader.read_many(some, in_order=bool(seed % 4)):
                            assert one.view == expected[some[one.number]]
            except RequestError as error:
                outcomes.append(str(error))
            except BaseException as problem:
                outcomes.append(repr(problem))

        workers = [
            threading.Thread(target=work, args=(n, reader, outcomes, begun), daemon=True)
            for n in range(4)
        ]
        for worker in workers:
            worker.start()
        begun.wait(PATIENCE)
        time.sleep(0.03)
        within(reader.close)
        for worker in workers:
            worker.join(PATIENCE)
        assert len(outcomes) == 4
        assert all("closed" in outcome for outcome in outcomes)
        assert reader.statistics.in_flight_count == 0
    assert open_descriptors() == descriptors


def test_closing_waits_for_a_single_read_in_another_thread(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate))
    reader = pack.reader(backend=backend)
    views: list[memoryview] = []
    one = threading.Thread(target=lambda: views.append(reader.read(0, 1)), daemon=True)
    one.start()
    while not backend.begun:
        time.sleep(0.001)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert not backend.is_closed
    gate.set()
    closing.join(PATIENCE)
    one.join(PATIENCE)
    assert backend.is_closed
    assert views == [on_disk(pack.locate(0, 1))]


def test_closing_wakes_a_thread_that_waits_for_a_batch(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate))
    reader = pack.reader(backend=backend, depth=1)
    batch = reader.submit([(0, 1), (0, 2), (0, 3)])
    outcomes: list[str] = []

    def take() -> None:
        try:
            outcomes.extend(str(one.number) for one in batch.completions())
        except RequestError as error:
            outcomes.append(str(error))

    taker = threading.Thread(target=take, daemon=True)
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


@pytest.mark.parametrize("has_pool", [True, False])
def test_a_dropped_batch_ends_its_reads_with_the_next_call(
    pack: Pack, name: str, has_pool: bool
) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate, times=2))
    pool = moepack.BufferPool(4, 1 << 16) if has_pool else None
    with pack.reader(backend=backend, pool=pool, depth=2) as reader:
        batch = reader.submit(keys_of(pack))
        assert reader.statistics.in_flight_count == 2
        threading.Timer(0.05, gate.set).start()
        del batch
        gc.collect()
        assert reader.statistics.in_flight_count == reader.statistics.in_flight_length == 0
        assert gate.is_set()
        assert len(backend.begun) == 2
        assert backend.open_queues == 0
        assert pool is None or pool.free_count == 4
        the_rest_reads_right(pack, reader, errors=0)


def test_leaving_read_many_early_gives_buffers_back_with_the_next_call(
    pack: Pack, name: str
) -> None:
    pool = moepack.BufferPool(5, 1 << 16)
    backend = FaultyBackend(make(name), Fault(delay=0.002))
    with pack.reader(backend=backend, pool=pool, depth=3) as reader:
        for stop in range(3):
            for one in reader.read_many(keys_of(pack), in_order=bool(stop % 2)):
                one.release()
                if one.number >= stop:
                    break
            assert reader.statistics.in_flight_count == 0  # the next call
            assert pool.free_count == 5
            assert backend.open_queues == 0
        assert len(backend.begun) < 3 * 16
        many = reader.read_many(keys_of(pack))
        next(many).release()
        with pytest.raises(ZeroDivisionError):
            cast("Generator[Any]", many).throw(ZeroDivisionError)
        assert pool.free_count == 5
        assert reader.statistics.in_flight_count == 0


# Buffers and pools


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(36863), "the buffer does not fit, expected 36,864 writable bytes, found 36,863"),
        (bytearray(), "expected 36,864 writable bytes, found 0 bytes"),
        (bytes(36864), "expected 36,864 writable bytes, found a read-only one"),
        (memoryview(bytes(40000)), "found a read-only one"),
        (np.zeros(80000, np.uint8)[::2], "not a contiguous buffer"),
        (np.zeros((200, 200), order="F"), "not a contiguous buffer"),
        ("a text", "not a contiguous buffer .*bytes-like"),
        (None, "not a contiguous buffer"),
        ([0] * 36864, "not a contiguous buffer"),
        (4096, "not a contiguous buffer"),
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
        the_rest_reads_right(pack, reader, errors=0)


def test_buffers_that_are_no_more_are_refused_as_any_others() -> None:
    closed = mmap.mmap(-1, 4096)
    closed.close()
    released = memoryview(bytearray(4096))
    released.release()
    for buffer in (closed, released, np.zeros(512, "M8[s]")):
        with pytest.raises(RequestError, match="not a contiguous buffer"):
            buffers.writable_bytes(buffer, 8)


def test_arrays_of_python_objects_are_no_buffers() -> None:
    with pytest.raises(RequestError):
        buffers.writable_bytes(np.array([None] * 8), 8)


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
        held = list(itertools.islice(batch.completions(in_order=in_order), 2))
        assert pool.free_count == 0
        for _ in range(2):
            with pytest.raises(RequestError, match="all buffers of the pool are taken") as caught:
                next(batch.completions(in_order=in_order))
            assert caught.value.hint == "release what was read before, or make the pool larger"
        assert len(batch) == 4
        for one in held:
            assert one.view == on_disk(pack.locate(0, one.expert))
            one.release()
        numbers, errors = take_all(batch, in_order=in_order)
        assert sorted([*numbers, *(one.number for one in held)]) == list(range(6))
        assert errors == []
        assert pool.free_count == 2
        the_rest_reads_right(pack, reader, errors=0)


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


def fail_new_memory(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    fail_allocation(monkeypatch, Arena, "take", after, MachineError("cannot allocate it"))


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_that_cannot_be_had_is_one_experts_error(
    pack: Pack, name: str, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [(0, n) for n in range(6)]
    with pack.reader(backend=name, depth=2) as made:
        for failing in range(6):
            fail_new_memory(monkeypatch, failing)
            with made.submit(keys) as batch:
                numbers, errors = within(lambda: take_all(batch, in_order=in_order))
            assert sorted(numbers) == [n for n in range(6) if n != failing]
            where = pack.locate(0, failing)
            (error,) = errors
            assert isinstance(error, MachineError)
            assert str(error) == (
                f"{where.path}: layer 0 expert {failing} blob at byte {where.offset:,}: "
                "cannot allocate it"
            )
            fail_new_memory(monkeypatch, 0)
            with pytest.raises(MachineError, match=f"layer 0 expert {failing} .*cannot allocate"):
                made.read(0, failing)
            monkeypatch.undo()
        the_rest_reads_right(pack, made)


def test_memory_that_cannot_be_had_for_several_reads_is_one_error(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(depth=1) as made:
        fail_new_memory(monkeypatch, 1)
        with made.submit([(0, 0), (0, 1), (0, 2)], parts=("gate", "down")) as batch:
            numbers, errors = take_all(batch, in_order=True)
        assert numbers == [0, 2]
        assert ["layer 0 expert 1" in str(error) for error in errors] == [True]
        monkeypatch.undo()
        the_rest_reads_right(pack, made)


@pytest.mark.parametrize("direct", ["direct", "uring"])
def test_memory_that_cannot_be_had_for_the_ends_of_a_read_is_an_error_with_its_place(
    packs: dict[str, Path], direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is no whole number of blocks needs a block of the backend's own."""
    require(direct, packs["gpt-oss"])
    with moepack.open(packs["gpt-oss"]) as pack, pack.reader(backend=direct) as made:
        where = pack.locate(0, 1, "up")
        assert where.length % 512
        no_memory = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        fail_allocation(monkeypatch, aligned_read, "map_memory", 0, no_memory)
        place = f"layer 0 expert 1 {where.part} at byte {where.offset:,}: cannot read: Cannot alloc"
        with pytest.raises(MachineError, match=place):
            made.read_into(mmap.mmap(-1, where.length), 0, 1, "up")
        the_rest_reads_right(pack, made, errors=1)


@pytest.mark.parametrize("direct", ["direct", "uring"])
def test_memory_that_cannot_be_had_for_the_ends_of_a_read_is_one_experts_error(
    packs: dict[str, Path], direct: str
) -> None:
    """In a process of its own, that can be stopped: its batch waits for ever."""
    code = """
        import errno, mmap, sys, moepack
        from moepack.storage import buffers, aligned_read
        left = [1]
        def map_memory(length):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return buffers.map_memory(length)
        with moepack.open(sys.argv[1]) as pack, pack.reader(backend=sys.argv[2]) as reader:
            aligned_read.map_memory = map_memory
            into = [mmap.mmap(-1, pack.locate(0, n, "up").length) for n in range(3)]
            keys = [(0, 0), (0, 1), (0, 2)]
            with reader.submit(keys, parts=("up",), into=into) as batch:
                while len(batch):
                    try:
                        for one in batch.completions(in_order=True):
                            print("right")
                    except moepack.MachineError as error:
                        print(error.problem)
    """
    out = run_child(code, packs["gpt-oss"], require(direct, packs["gpt-oss"]))
    assert sorted(out.splitlines()) == ["cannot read: Cannot allocate memory", "right", "right"]


def test_too_many_open_files_is_an_error_that_passes(packs: dict[str, Path], name: str) -> None:
    """In a process of its own; the second data file cannot be opened until others are closed."""
    code = """
        import os, resource, sys, moepack
        with moepack.open(sys.argv[1]) as pack, pack.reader(backend=sys.argv[2]) as reader:
            reader.read(0, 0)
            batch = reader.submit([(0, 2), (1, 2), (0, 3)])  # its queue exists
            list(batch.completions())
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
            reader.close()
        with moepack.open(sys.argv[1]) as pack, pack.reader(backend=sys.argv[2]) as reader:
            with reader.submit([(0, 2)]) as batch:
                list(batch.completions())
            held = []
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            for read in (lambda: reader.read(1, 2), lambda: list(reader.read_many([(1, 2)]))):
                try:
                    read()
                except moepack.MachineError as error:
                    print(str(error).rpartition("/")[2], "|", error.hint)
            got = []
            with reader.submit([(0, 1), (1, 1), (0, 4)]) as batch:
                while len(batch):
                    try:
                        for one in batch.completions(in_order=True):
                            got.append(one.number)
                    except moepack.MachineError as error:
                        got.append(str(error.place).partition(" at ")[0])
            print(got)
            for descriptor in held:
                os.close(descriptor)
            print(len(reader.read(1, 2)), reader.statistics.in_flight_count)
    """
    out = run_child(code, packs["qwen3moe"], name)
    with moepack.open(packs["qwen3moe"]) as pack:
        where = pack.locate(1, 2)
    problem = (
        f"experts-00001.bin: layer 1 expert 2 blob at byte {where.offset:,}: "
        "cannot read: Too many open files | raise the limit of open files (ulimit -n)\n"
    )
    assert out == f"{problem * 2}[0, 'layer 1 expert 1 blob', 2]\n{where.length} 0\n"


def test_a_reader_that_cannot_be_made_leaves_nothing_open(packs: dict[str, Path]) -> None:
    code = """
        import os, resource, sys, moepack
        with moepack.open(sys.argv[1]) as pack:
            used = len(os.listdir("/proc/self/fd")) - 1
            for spare in range(4):
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 4096))
                for backend in ("uring", "direct", "buffered"):
                    try:
                        pack.reader(backend=backend).close()
                    except moepack.MachineError as error:
                        assert "Too many open files" in str(error), error
                        print(error.hint)
                reader = pack.reader()
                reader.close()
                assert reader.backend, reader.why
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            assert len(os.listdir("/proc/self/fd")) - 1 == used
            with pack.reader() as reader:
                reader.read(0, 0)
    """
    out = run_child(code, packs["qwen3moe"])
    assert set(out.splitlines()) == {"raise the limit of open files (ulimit -n)"}


# Queues that cannot be made


@pytest.mark.parametrize("has_pool", [True, False])
@pytest.mark.parametrize("name", ["buffered"])
def test_a_queue_that_cannot_be_made_is_the_machines_fault(
    pack: Pack, name: str, has_pool: bool
) -> None:
    backend = FaultyBackend(make(name), queue_codes=[errno.ENOMEM, errno.EMFILE])
    pool = moepack.BufferPool(4, 1 << 16) if has_pool else None
    with pack.reader(backend=backend, pool=pool) as made:
        for _ in range(2):
            message = "cannot set up buffered: (Cannot allocate memory|Too many open files)"
            with pytest.raises(MachineError, match=message) as caught:
                made.submit(keys_of(pack)[:3])
            assert "use fewer threads" in str(caught.value.hint)
            del caught
            gc.collect()
        assert made.statistics.in_flight_count == 0
        assert pool is None or pool.free_count == 4
        the_rest_reads_right(pack, made)


def test_a_reader_is_left_by_the_error_that_its_queue_could_not_be_made(pack: Pack) -> None:
    def leave() -> None:
        with pack.reader(backend=FaultyBackend(make("buffered"), queue_codes=[errno.EMFILE])) as r:
            r.submit([(0, 0)])

    with pytest.raises(MachineError, match="Too many open files"):
        within(leave)


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
        the_rest_reads_right(pack, made, errors=0)


def test_as_they_come_is_as_they_come(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), fault_at(pack, 0, 0, until=gate))
    with pack.reader(backend=backend) as made, made.submit([(0, n) for n in range(5)]) as batch:
        numbers = []
        for one in batch.completions():
            numbers.append(one.number)
            if len(numbers) == 4:
                gate.set()
        assert numbers[-1] == 0
        assert sorted(numbers) == list(range(5))


def test_both_orders_may_be_asked_of_one_batch(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), fault_at(pack, 0, 0, until=gate))
    with pack.reader(backend=backend) as made, made.submit([(0, n) for n in range(6)]) as batch:
        first = next(batch.completions()).number
        assert first
        gate.set()
        rest = [one.number for one in batch.completions(in_order=True)]
        assert rest == [n for n in range(6) if n != first]


@pytest.mark.parametrize(
    ("depth", "bound"), [(1, 1 << 30), (3, 1 << 30), (32, 100_000), (4, 90_000), (32, 36864)]
)
def test_the_bounds_are_never_exceeded(pack: Pack, name: str, depth: int, bound: int) -> None:
    backend = FaultyBackend(make(name), Fault(delay=0.001))
    keys = keys_of(pack)
    lengths = [pack.locate(*key).length for key in keys]
    with pack.reader(backend=backend, depth=depth, max_in_flight=bound) as made:
        for in_order in (True, False):
            assert len(list(made.read_many(keys, in_order=in_order))) == len(keys)
    allowed = max(bound, *lengths)
    assert backend.peak_count <= depth
    assert backend.peak_length <= allowed
    # And they are used: what fits is begun.
    assert backend.peak_count == min(depth, 32) or backend.peak_length + max(lengths) > bound
    assert made.statistics.peak_length == backend.peak_length


def test_the_first_read_of_a_batch_begins_however_long(pack: Pack, name: str) -> None:
    backend = FaultyBackend(make(name))
    keys = keys_of(pack)[:8]
    with pack.reader(backend=backend, max_in_flight=1) as made:
        batches = [made.submit(keys), made.submit(keys)]
        assert len(backend.begun) == 2
        for batch in reversed(batches):
            assert len(list(batch.completions())) == 8
        assert len(made.read(0, 0)) == pack.locate(0, 0).length
        assert backend.peak_count == 2


def test_two_batches_share_the_bounds(pack: Pack, name: str) -> None:
    backend = FaultyBackend(make(name))
    keys = keys_of(pack)
    with pack.reader(backend=backend, depth=5) as made:
        first, second = made.submit(keys), made.submit(keys)
        assert made.statistics.in_flight_count == len(backend.begun) == 6
        for one, other in zip(first.completions(), second.completions(in_order=True), strict=True):
            assert made.statistics.in_flight_count <= 6
            assert one.view == on_disk(pack.locate(*keys[one.number]))
            assert other.view == on_disk(pack.locate(*keys[other.number]))
        assert backend.peak_count <= 6
        assert made.statistics.in_flight_count == 0


def test_a_single_read_is_never_held_back(pack: Pack, name: str) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make(name), Fault(until=gate, times=1))
    with pack.reader(backend=backend, depth=1, max_in_flight=1) as made:
        batch = made.submit([(0, 0), (0, 1)])
        assert within(lambda: made.read(0, 2)) == on_disk(pack.locate(0, 2))
        assert made.statistics.in_flight_count == 1
        gate.set()
        assert len(list(batch.completions())) == 2


@pytest.mark.parametrize("register", [True, False])
def test_threads_with_batches_of_their_own_all_finish(
    pack: Pack, name: str, register: bool
) -> None:
    keys = keys_of(pack)
    expected = {key: on_disk(pack.locate(*key)) for key in keys}
    pool = moepack.BufferPool(4 * 3, 1 << 16, register=register)
    backend = FaultyBackend(make(name), fault_at(pack, 0, 9, code=errno.EIO))
    done: list[int] = []
    with pack.reader(backend=backend, pool=pool, depth=3, max_in_flight=80_000) as made:

        def work(seed: int) -> None:
            choice = random.Random(seed)
            for _ in range(5):
                some = choice.choices(keys, k=8)
                with made.submit(some[:3]) as batch:
                    while len(batch):
                        with contextlib.suppress(MachineError):
                            for one in batch.completions(in_order=bool(seed % 2)):
                                assert one.view == expected[some[one.number]]
                                one.release()
            done.append(seed)

        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
        assert sorted(done) == [0, 1, 2, 3]
        assert pool.free_count == 12
        the_rest_reads_right(pack, made, (0, 9))
    assert backend.open_queues == 0


def test_threads_share_one_batch_and_each_gets_others(pack: Pack, name: str) -> None:
    keys = keys_of(pack) * 2
    with pack.reader(backend=name, depth=4) as made, made.submit(keys) as batch:
        seen: list[int] = []

        def work() -> None:
            # The last is left to be taken below.
            while len(batch) > 4:
                one = next(batch.completions())
                assert one.view == on_disk(pack.locate(*keys[one.number]))
                seen.append(one.number)

        workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()
        seen += [one.number for one in batch.completions()]
        assert sorted(seen) == list(range(len(keys)))


def test_threads_that_share_a_batch_all_come_to_its_end(pack: Pack) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make("buffered"), Fault(until=gate))
    outcomes: list[str] = []
    with pack.reader(backend=backend) as made, made.submit([(0, 0)]) as batch:

        def work() -> None:
            try:
                outcomes.append(f"took {len(list(batch.completions()))}")
            except RequestError as error:
                outcomes.append(str(error))

        workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for worker in workers:
            worker.start()
        time.sleep(0.05)
        gate.set()
        for worker in workers:
            worker.join(PATIENCE)
    assert sorted(outcomes) == ["took 0", "took 1"]


# Threads of the buffered and direct backends


def test_no_thread_writes_to_the_descriptors_of_a_closed_queue(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may be another file's by then."""
    problems: list[str] = []
    original = threaded._Signal.set

    def late(signal: threaded._Signal) -> None:
        time.sleep(0.05)
        original(signal)

    monkeypatch.setattr(threaded._Signal, "set", late)
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


def test_a_program_that_ends_with_a_batch_in_flight_ends(packs: dict[str, Path]) -> None:
    """A drive that is slow, and a batch that is still a global when the interpreter stops."""
    code = """
        import os, sys, time, moepack
        # In a namespace of its own, or the function would keep this one alive.
        drive = {"sleep": time.sleep, "read": os.preadv}
        exec("def slow(*all): sleep(0.3); return read(*all)", drive)
        pack = moepack.open(sys.argv[1])
        reader = pack.reader(backend=sys.argv[2])
        os.preadv = drive["slow"]
        batch = reader.submit([(0, n) for n in range(8)])
        time.sleep(0.1)
    """
    run_child(code, packs["qwen3moe"], "buffered")


def test_a_program_that_ends_with_an_asyncio_reader_in_flight_ends(packs: dict[str, Path]) -> None:
    code = """
        import asyncio, logging, sys, warnings, moepack, moepack.aio
        logging.disable()  # asyncio tells of what was left undone
        warnings.simplefilter("ignore")
        async def work():
            global reader, reads
            reader = moepack.aio.Reader(moepack.open(sys.argv[1]), backend="buffered")
            reads = [asyncio.ensure_future(reader.read(0, n)) for n in range(8)]
            await asyncio.sleep(0)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(work())
    """
    run_child(code, packs["qwen3moe"])


def test_a_dropped_reader_leaves_no_threads_and_no_files(pack: Pack, name: str) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    reader = pack.reader(backend=name, depth=8)
    list(reader.read_many(keys_of(pack)))
    del reader
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_closed_reader_leaves_no_threads(pack: Pack, name: str) -> None:
    before = threading.active_count()
    with pack.reader(backend=name, depth=8) as made:
        list(made.read_many(keys_of(pack)))
    assert threading.active_count() == before
