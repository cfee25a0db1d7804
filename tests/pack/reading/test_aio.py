"""Reading in an asyncio program: the same bytes and errors, and a loop that never stands still."""

import asyncio
import contextlib
import errno
import gc
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MachineError, RequestError
from moepack.pack.reading.aio import AsyncReader
from moepack.pack.reading.pack import Pack
from tests.support.children import PATIENCE, run_child
from tests.support.faulty_backend import (
    Fault,
    FaultyBackend,
    fault_at,
    make,
)
from tests.support.models import keys_of, on_disk

Work = Callable[[], Coroutine[Any, Any, None]]


def run(work: Work) -> None:
    """Run `work` in a loop that tells of everything that goes wrong in it, and of no waiting."""
    complaints: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
        async with asyncio.timeout(PATIENCE):
            await work()
        gc.collect()

    asyncio.run(watched())
    gc.collect()
    assert complaints == []


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def the_rest_reads_right(
    pack: Pack, made: AsyncReader, *without: tuple[int, int], errors: int | None = None
) -> None:
    keys = [key for key in keys_of(pack) if key not in without]
    for key, view in zip(keys, await asyncio.gather(*(made.read(*k) for k in keys)), strict=True):
        assert view == on_disk(pack.locate(*key))
    now = made.statistics
    assert (now.in_flight_count, now.in_flight_length) == (0, 0)
    if errors is not None:
        assert now.error_count == errors


# Cancellation


def test_a_cancelled_read_ends_before_its_memory_is_the_callers(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, until=gate))
        async with AsyncReader(pack, backend=backend) as made:
            buffer = bytearray(1 << 16)
            task = asyncio.create_task(made.read_into(buffer, 0, 1))
            await until(lambda: backend.begun)
            for _ in range(2):
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=0.02)
                assert not done
                assert not any(buffer)
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            before = bytes(buffer)
            assert before.startswith(on_disk(pack.locate(0, 1)))
            await asyncio.sleep(0.02)
            assert buffer == before
            assert made.statistics.in_flight_count == 0
            await the_rest_reads_right(pack, made, errors=0)

    run(work)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_loop_over_experts_that_is_cancelled_waits_for_its_reads(
    pack: Pack, name: str, in_order: bool
) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 3, until=gate))
        buffers = [bytearray(1 << 16) for _ in range(6)]
        async with AsyncReader(pack, backend=backend) as made:
            came: list[int] = []

            async def loop() -> None:
                keys = [(0, n) for n in range(6)]
                async for one in made.read_many(keys, into=buffers, in_order=in_order):
                    came.append(one.number)

            task = asyncio.create_task(loop())
            await until(lambda: len(came) == (3 if in_order else 5))
            other = asyncio.create_task(made.read(1, 3))
            for _ in range(2):
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=0.02)
                assert not done
                assert not any(buffers[3])
            gate.set()
            assert await other == on_disk(pack.locate(1, 3))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert buffers[3].startswith(on_disk(pack.locate(0, 3)))
            assert 3 not in came
            await the_rest_reads_right(pack, made, errors=0)

    run(work)


@pytest.mark.parametrize("in_order", [True, False])
def test_leaving_a_loop_over_experts_early_waits_for_the_rest(
    pack: Pack, name: str, in_order: bool
) -> None:
    async def work() -> None:
        faults = fault_at(pack, 1, 15, code=errno.EIO), Fault(delay=0.001)
        backend = FaultyBackend(make(name), *faults)
        async with AsyncReader(pack, backend=backend, depth=4) as made:
            many = made.read_many(keys_of(pack), in_order=in_order)
            async with contextlib.aclosing(many) as experts:  # type: ignore[type-var]
                async for one in experts:
                    assert one.view == on_disk(pack.locate(one.layer, one.expert))
                    break
            assert made.statistics.in_flight_count == 0
            await the_rest_reads_right(pack, made, (1, 15), errors=1)

    run(work)


# The loop and the threads


def test_a_read_that_waits_leaves_the_loop_to_others(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, until=gate))
        async with AsyncReader(pack, backend=backend) as made:
            task = asyncio.create_task(made.read(0, 1))
            await until(lambda: backend.begun)
            assert await made.read(0, 2) == on_disk(pack.locate(0, 2))
            assert not task.done()
            gate.set()
            await task

    run(work)


def test_a_queue_that_cannot_be_made_is_an_error_of_the_machine(pack: Pack) -> None:
    async def work() -> None:
        backend = FaultyBackend(make("buffered"), queue_codes=[errno.EMFILE])
        async with AsyncReader(pack, backend=backend) as made:
            with pytest.raises(MachineError, match="Too many open files"):
                await anext(made.read_many(keys_of(pack)))
            await the_rest_reads_right(pack, made)
        assert backend.is_closed

    run(work)


def test_a_reader_is_made_inside_of_a_loop(pack: Pack) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncReader(pack)


# Closing


def test_closing_waits_for_what_was_asked_for(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        faults = fault_at(pack, 0, 1, until=gate), fault_at(pack, 0, 4, code=errno.EIO)
        backend = FaultyBackend(make(name), *faults)
        made = AsyncReader(pack, backend=backend, depth=1)
        *tasks, failing = [asyncio.create_task(made.read(0, n)) for n in (1, 2, 3, 4)]
        await until(lambda: backend.begun)
        closing = asyncio.create_task(made.close())
        done, _ = await asyncio.wait([closing], timeout=0.02)
        assert not done
        assert not backend.is_closed
        with pytest.raises(RequestError, match="the reader is closed"):
            await made.read(0, 5)
        gate.set()
        await closing
        assert backend.is_closed
        assert await asyncio.gather(*tasks) == [on_disk(pack.locate(0, n)) for n in (1, 2, 3)]
        with pytest.raises(MachineError, match="layer 0 expert 4"):
            await failing
        await made.close()

    run(work)


def test_closing_waits_for_a_loop_over_experts(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 2, until=gate))
        made = AsyncReader(pack, backend=backend)
        many = made.read_many([(0, n) for n in range(4)])
        assert (await anext(many)).number == 0
        closing = asyncio.create_task(made.close())
        done, _ = await asyncio.wait([closing], timeout=0.02)
        assert not done
        gate.set()
        await closing
        assert backend.is_closed
        assert [one.number async for one in many] == [1, 2, 3]

    run(work)


def test_a_close_that_was_cancelled_can_be_asked_for_again(pack: Pack) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 1, until=gate))
        made = AsyncReader(pack, backend=backend)
        task = asyncio.create_task(made.read(0, 1))
        await until(lambda: backend.begun)
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.close(), 0.01)
        await task
        await made.close()
        assert backend.is_closed

    run(work)


# In a process of its own, where every warning is an error


@pytest.mark.long
def test_a_program_in_development_mode_has_nothing_to_complain_about(
    packs: dict[str, Path], name: str
) -> None:
    code = """
        import asyncio, gc, sys, moepack, moepack.aio

        async def main():
            asyncio.get_running_loop().slow_callback_duration = 10  # the machine may be busy
            with moepack.open(sys.argv[1]) as pack:
                async with moepack.aio.Reader(pack, backend=sys.argv[2]) as reader:
                    await asyncio.gather(*(reader.read(0, n) for n in range(16)))
                    async for expert in reader.read_many([(1, 1), (1, 2)], in_order=False):
                        expert.release()
                    async for expert in reader.read_many([(1, n) for n in range(8)]):
                        break
                    task = asyncio.create_task(reader.read(0, 3))
                    await asyncio.sleep(0)
                    task.cancel()
                    try:
                        await reader.read(0, 99)
                    except moepack.RequestError:
                        pass
                with pack.reader(backend=sys.argv[2]) as reader:
                    list(reader.read_many([(0, 1), (1, 1)]))
                    reader.submit([(0, 2)])

        asyncio.run(main())
        gc.collect()
    """
    assert run_child(code, packs["qwen3moe"], name) == ""
