"""Batches and readers that nobody holds any more, wherever the interpreter notices it."""

import gc
import threading
from pathlib import Path

import pytest

import moepack
from moepack.pack.reading.pack import Pack
from tests.support.amounts import amounts
from tests.support.children import run_child, within
from tests.support.faulty_backend import Fault, FaultyBackend, fault_at, make
from tests.support.models import keys_of, on_disk


@pytest.mark.parametrize("step", amounts(4, 1))
def test_a_collection_at_any_line_of_a_read_harms_no_read(
    packs: dict[str, Path], step: int
) -> None:
    """Newer interpreters collect between any two instructions: here a tracer does, at each line."""
    code = """
        import gc, os, sys, moepack
        folder = os.path.dirname(moepack.__file__)

        def collect_at(line):
            left = [line]
            def trace(frame, event, _):
                if not frame.f_code.co_filename.startswith(folder):
                    return None
                if event == "line":
                    left[0] -= 1
                    if not left[0]:
                        gc.collect()
                return trace
            return trace, left

        def drop(reader):
            batch = reader.submit([(0, n) for n in range(3)])
            batch.itself = batch

        with moepack.open(sys.argv[1]) as pack, pack.reader(backend="buffered", depth=2) as reader:
            keys = [(1, 2), (1, 5), (0, 7)]
            expected = [bytes(one.view) for one in reader.read_many(keys)]
            gc.collect()
            gc.freeze()
            gc.disable()
            left, line = [0], 0
            while left[0] <= 0:
                line += int(sys.argv[2])
                others = [reader.submit(keys), reader.submit(keys)]
                drop(reader)
                trace, left = collect_at(line)
                sys.settrace(trace)
                views = [one.view for one in reader.read_many(keys)]
                reader.read(1, 2)
                sys.settrace(None)
                assert views == expected
                for batch in others:
                    assert [one.view for one in batch.completions(in_order=True)] == expected
                    batch.close()
            gc.collect()
            assert reader.statistics.in_flight_count == 0
        print("right", line > 300)
    """
    assert run_child(code, packs["qwen3moe"], str(step)) == "right True\n"


COLLECTING = """
import gc, os, sys, threading, time, moepack
dropped, collected, read = threading.Event(), threading.Event(), os.preadv

def collecting(*all):
    if all[3:]:
        raise BlockingIOError  # not cached, so that a thread reads it
    if threading.current_thread() is not threading.main_thread():
        dropped.wait()
        gc.collect()
        collected.set()
    return read(*all)

def drop(reader, layer):
    batch = reader.submit([(layer, n) for n in range(8)])
    batch.itself = batch

before = threading.active_count()
pack = moepack.open(sys.argv[1])
reader = pack.reader(backend="buffered")
os.preadv = collecting
gc.disable()
"""
"""A reader, `reader`, in whose threads dropped batches are collected once `dropped` is set."""
COLLECTIONS = {
    "does not wait for that read": """
drop(reader, 0)
dropped.set()
assert collected.wait(60)
assert len(reader.read(0, 9)) == pack.locate(0, 9).length
""",
    "does not wait for a reader that closes": """
batch = reader.submit([(0, n) for n in range(4)])
drop(reader, 1)
threading.Timer(0.1, dropped.set).start()
reader.close()
assert reader.statistics.in_flight_count == 0
""",
    "closes the dropped reader of the batch": """
drop(reader, 0)
del reader
dropped.set()
while True:  # all threads go but that of the reader that sees it
    gc.collect()
    with pack.reader(backend="buffered"):
        if threading.active_count() - before <= 1:
            break
    time.sleep(0.01)
""",
}


@pytest.mark.parametrize("program", COLLECTIONS.values(), ids=COLLECTIONS)
def test_a_collection_in_a_thread_that_reads(program: str, packs: dict[str, Path]) -> None:
    assert run_child(COLLECTING + program, packs["qwen3moe"]) == ""


def test_a_dropped_reader_with_reads_in_flight_is_closed_by_the_next_one(pack: Pack) -> None:
    gate = threading.Event()
    backend = FaultyBackend(make("buffered"), Fault(until=gate))
    reader = pack.reader(backend=backend)
    batch = reader.submit(keys_of(pack))
    del batch, reader
    gc.collect()
    assert not backend.is_closed
    gate.set()
    with pack.reader():
        assert backend.is_closed
        assert backend.open_queues == 0


def test_dropping_waits_for_nothing(pack: Pack, name: str) -> None:
    gate = threading.Event()
    pool = moepack.BufferPool(4, 1 << 16)
    backend = FaultyBackend(make(name), Fault(until=gate))
    with pack.reader(backend=backend, pool=pool) as reader:
        batch = reader.submit(keys_of(pack)[:4])

        def drop() -> None:
            nonlocal batch
            del batch

        within(drop)
        assert pool.free_count == 0, "the system may still write there"
        gate.set()
        assert reader.read(0, 1) == on_disk(pack.locate(0, 1))
        assert pool.free_count == 4


def test_dropping_a_loop_over_experts_waits_for_nothing(pack: Pack, name: str) -> None:
    gate = threading.Event()
    keys = keys_of(pack)[:4]
    pool = moepack.BufferPool(5, 1 << 16)
    backend = FaultyBackend(make(name), *(fault_at(pack, *key, until=gate) for key in keys[1:]))
    with pack.reader(backend=backend, pool=pool) as reader:
        many = reader.read_many(keys)
        next(many).release()

        def drop() -> None:
            nonlocal many
            del many

        within(drop)
        gate.set()
        assert reader.read(0, 1) == on_disk(pack.locate(0, 1))
        assert reader.statistics.in_flight_count == 0
        assert pool.free_count == 5
        assert backend.open_queues == 0


INTERRUPTED = """
import os, signal, sys, threading, moepack
from tests.support.faulty_backend import Fault, FaultyBackend, make

gate = threading.Event()

def stop(*_):
    gate.set()
    raise KeyboardInterrupt

def resources():
    threads = [one for one in threading.enumerate() if one.name.startswith("moepack")]
    return len(os.listdir("/proc/self/fd")), len(threads)

signal.signal(signal.SIGALRM, stop)
before = resources()
pool = moepack.BufferPool(8, 1 << 16)
with moepack.open(sys.argv[1]) as pack:
    backend = FaultyBackend(make(sys.argv[2]), Fault(until=gate))
    reader = pack.reader(backend=backend, pool=pool)
    batch = reader.submit([(0, n) for n in range(8)])
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        if sys.argv[3] == "drop":
            del batch
            reader.statistics
        else:
            reader.close()
        print("swallowed")
    except KeyboardInterrupt:
        print("interrupted")
    if sys.argv[3] == "drop":
        print(reader.statistics.in_flight_count, pool.free_count)
    reader.close()
    print(reader.statistics.in_flight_count, pool.free_count, backend.is_closed)
batch = None
print(resources() == before)
"""


@pytest.mark.parametrize("how", ["drop", "close"])
def test_the_call_after_an_interrupted_one_closes_what_was_dropped(
    packs: dict[str, Path], name: str, how: str
) -> None:
    """The signal comes while a call waits for the batch's reads; nothing swallows it."""
    dropped = "0 8\n" if how == "drop" else ""
    out = run_child(INTERRUPTED, packs["qwen3moe"], name, how)
    assert out == f"interrupted\n{dropped}0 8 True\nTrue\n"
