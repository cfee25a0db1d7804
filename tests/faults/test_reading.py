"""Errors while reading, named to the byte, and never of more than one read; and forked readers."""

import errno
import gc
import itertools
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
from moepack.pack.reading.pack import Pack
from tests.support.children import PATIENCE, in_threads, run_child, within
from tests.support.faulty_backend import (
    Fault,
    FaultyBackend,
    fault_at,
    make,
)
from tests.support.models import flip, keys_of, on_disk, reads_right
from tests.support.reads import descriptors, in_child

HINT_EIO = "the drive or its connection fails: see the kernel's log, then run `moepack verify`"


def open_descriptors() -> set[str]:
    """Return the open descriptors, without those of other tests' dropped readers."""
    gc.collect()
    return descriptors()


def take_all(batch: moepack.Batch, *, in_order: bool) -> tuple[list[int], list[MoepackError]]:
    """Take all of a batch, going on after each error; give the numbers and the errors."""
    numbers: list[int] = []
    errors: list[MoepackError] = []
    while len(batch):
        try:
            for one in batch.completions(in_order=in_order):
                numbers.append(one.number)
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


def test_a_read_of_joined_parts_names_them_all(packs: dict[str, Path]) -> None:
    with moepack.open(packs["gpt-oss"]) as pack:
        first, last = pack.locate(0, 5, "gate"), pack.locate(0, 5, "down.bias")
        names = {last: last.part, first: "ffn_gate_exps.weight and ffn_up_exps.weight"}
        backend = FaultyBackend(make("buffered"))
        with pack.reader(backend=backend) as reader:
            for where, parts in names.items():
                backend.faults = [fault_at(pack, 0, 5, where.part, code=errno.EIO, times=1)]
                place = f"layer 0 expert 5 {re.escape(parts)} at byte {where.offset:,}: cannot read"
                with pytest.raises(MachineError, match=place):
                    list(reader.read_many([(0, 5)], parts=("up", "gate", "down.bias")))
            (one,) = reader.read_many([(0, 5)], parts=("up", "gate", "down.bias"))
            assert one.part("down.bias") == on_disk(last)
            reads_right(pack, reader, errors=2)


def test_padding_is_not_judged(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack, pack.reader() as reader:
        gate = pack.locate(0, 6, "gate")
        flip(gate.path, gate.offset + gate.length)
        assert reader.read(0, 6)[gate.length] == 1
        (one,) = reader.read_many([(0, 6)], parts=("gate", "up"))
        assert one.part("gate") == on_disk(gate)


# Files that change under a reader


@pytest.mark.parametrize("left", [10, 8192, 0, -4096])
def test_a_file_that_is_cut_and_mended_reads_on(pack_copy: Path, name: str, left: int) -> None:
    """Cut inside a page, on one, and before the blob."""
    with moepack.open(pack_copy) as pack, pack.reader(backend=name) as reader:
        where = pack.locate(1, 15)
        whole = where.path.read_bytes()
        os.truncate(where.path, where.offset + left)
        message = f"expected {where.length:,} bytes, found {max(0, left):,}"
        with pytest.raises(PackError, match=f"layer 1 expert 15 blob at byte .*{message}"):
            list(reader.read_many([(1, 0), (1, 15)]))
        where.path.write_bytes(whole)
        reads_right(pack, reader, errors=1)


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


def test_one_expert_of_several_reads_raises_once(packs: dict[str, Path], name: str) -> None:
    """Both of its reads fail, and it is one error."""
    late = threading.Event()
    with moepack.open(packs["gpt-oss"]) as pack:
        backend = FaultyBackend(
            make(name),
            fault_at(pack, 0, 1, "gate", code=errno.EIO),
            fault_at(pack, 0, 1, "down", code=errno.EMFILE, until=late),
        )
        with pack.reader(backend=backend) as reader:
            with reader.submit([(0, 1), (0, 2)], parts=("gate", "down")) as batch:
                threading.Timer(0.05, late.set).start()
                numbers, errors = take_all(batch, in_order=False)
            assert numbers == [1]
            assert [error.place for error in errors] == [
                f"layer 0 expert 1 ffn_gate_exps.weight at byte {pack.locate(0, 1).offset:,}"
            ]
            assert reader.statistics.error_count == 2
            reads_right(pack, reader, (0, 1), errors=2)


def test_read_many_ends_with_its_error(pack: Pack) -> None:
    backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 3, code=errno.EIO, times=1))
    with pack.reader(backend=backend) as reader:
        numbers = []
        many = reader.read_many([(0, n) for n in range(8)])
        for _ in range(3):
            numbers.append(next(many).number)
        with pytest.raises(MachineError, match="layer 0 expert 3"):
            next(many)
        assert list(many) == []
        assert numbers == [0, 1, 2]
        reads_right(pack, reader, errors=1)


# Closed readers and batches


def test_a_closed_reader_refuses_every_call(pack: Pack) -> None:
    reader = pack.reader()
    many = reader.read_many([(0, 0)])
    reader.close()
    calls: list[Callable[[], object]] = [
        lambda: reader.read(0, 0),
        lambda: reader.read_into(bytearray(1 << 16), 0, 0),
        lambda: reader.submit([(0, 0)]),
        lambda: next(many),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="the reader is closed"):
            call()


@pytest.mark.parametrize("in_order", [True, False])
def test_closing_the_reader_ends_a_batch_under_way(pack: Pack, name: str, in_order: bool) -> None:
    before = open_descriptors()
    backend = FaultyBackend(make(name), Fault(delay=0.005))
    reader = pack.reader(backend=backend, depth=2)
    batch = reader.submit(keys_of(pack))
    first = next(batch.completions(in_order=in_order))
    reader.close()
    assert backend.is_closed
    for _ in range(2):
        with pytest.raises(RequestError, match="closed"):
            next(batch.completions(in_order=in_order))
    assert len(batch) == 0
    assert first.view == on_disk(pack.locate(first.layer, first.expert))
    batch.close()
    assert len(backend.begun) <= 4
    assert open_descriptors() == before


def test_a_closed_batch_says_so_and_a_finished_one_just_ends(pack: Pack) -> None:
    with pack.reader() as reader:
        with reader.submit([(0, n) for n in range(4)]) as batch:
            list(itertools.islice(batch.completions(), 2))
        batch.close()
        with pytest.raises(RequestError, match="the batch was closed before all of it was taken"):
            next(batch.completions())
        with reader.submit([(0, 0)]) as batch:
            next(batch.completions())
        assert list(batch.completions()) == []


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


# Buffers


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytearray(36863), "the buffer does not fit, expected 36,864 writable bytes, found 36,863"),
        (bytes(36864), "expected 36,864 writable bytes, found a read-only one"),
        (np.zeros(80000, np.uint8)[::2], "not a contiguous buffer"),
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
        assert backend.begun == []


# Reads that dawdle and overtake each other


def test_in_order_is_in_order_however_reads_end(pack: Pack, name: str) -> None:
    choice = random.Random(1)
    keys = keys_of(pack)
    choice.shuffle(keys)
    backend = FaultyBackend(make(name), shuffle=choice.shuffle)
    with pack.reader(backend=backend, depth=7) as made:
        assert [one.number for one in made.read_many(keys)] == list(range(len(keys)))
        numbers = [one.number for one in made.read_many(keys, in_order=False)]
        assert sorted(numbers) == list(range(len(keys)))
        assert numbers != sorted(numbers)
        reads_right(pack, made, errors=0)


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


# Readers that end, or that nobody holds any more


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


@pytest.mark.parametrize("how", ["submit", "read_many"])
def test_what_is_dropped_in_flight_takes_no_place_in_it(pack: Pack, name: str, how: str) -> None:
    keys = keys_of(pack)
    with pack.reader(backend=name, depth=2) as reader:
        for _ in range(3):
            if how == "read_many":
                next(reader.read_many(keys))
            else:
                reader.submit(keys)
            assert reader.statistics.in_flight_count == 0
        reads_right(pack, reader, errors=0)


def test_a_reader_and_a_batch_that_the_collector_finds_are_closed(pack: Pack, name: str) -> None:
    """In a circle of references both are finalised, in any order, with reads in flight."""
    before = open_descriptors()
    for count in (0, 3, 32):
        holder: list[object] = []
        reader = pack.reader(backend=name, depth=4)
        batch = reader.submit(keys_of(pack))
        list(itertools.islice(batch.completions(), count))
        holder += [holder, reader, batch]
        del holder, reader, batch
    assert open_descriptors() == before


FORKED = "the reader belongs to the process that this one was forked from"


def test_every_call_in_a_child_is_refused(pack: Pack, name: str) -> None:
    keys = keys_of(pack)
    with pack.reader(backend=name, depth=4) as reader:
        list(reader.read_many(keys))
        batch = reader.submit(keys)
        calls: list[Callable[[], object]] = [
            lambda: reader.read(0, 0),
            lambda: reader.read_into(bytearray(1 << 16), 0, 0, "up"),
            lambda: reader.submit(keys),
            lambda: next(reader.read_many(keys)),
            lambda: next(batch.completions()),
            lambda: reader.statistics,
        ]

        def work() -> None:
            for call in calls:
                with pytest.raises(RequestError, match=FORKED) as caught:
                    call()
                assert caught.value.hint == "open the pack again in the child"

        in_child(work)
        for one in batch.completions():
            assert one.view == on_disk(pack.locate(*keys[one.number]))


def test_a_child_that_ends_as_programs_do_leaves_the_parent_alone(
    packs: dict[str, Path], name: str
) -> None:
    code = """
        import os, sys, moepack
        pack = moepack.open(sys.argv[1])
        keys = [(1, n) for n in range(16)]
        reader = pack.reader(backend=sys.argv[2], depth=4)
        expected = [bytes(one.view) for one in reader.read_many(keys)]
        batch = reader.submit(keys)
        child = os.fork()
        if not child:
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert [one.view for one in batch.completions(in_order=True)] == expected
        assert [one.view for one in reader.read_many(keys)] == expected
        print("right")
    """
    assert run_child(code, packs["qwen3moe"], name) == "right\n"
