"""Reading in an asyncio program: the same bytes and errors, and a loop that never stands still."""

import asyncio
import contextlib
import errno
import gc
import mmap
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.reading.aio import AsyncReader
from moepack.reading.pack import Pack
from moepack.storage.arena import Arena
from tests.support.children import PATIENCE
from tests.support.faulty_backend import (
    Fault,
    FaultyBackend,
    fail_allocation,
    fault_at,
    make,
    require,
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


def in_development(code: str, *arguments: str | Path) -> None:
    """Run `code` where every warning is an error; it has nothing to say."""
    child = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


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


def test_every_call_gives_what_is_on_disk(pack: Pack, name: str) -> None:
    async def work() -> None:
        async with AsyncReader(pack, backend=name, depth=4) as made:
            assert made.backend == name
            assert made.why.startswith("asked for; ")
            keys = keys_of(pack)
            await the_rest_reads_right(pack, made)
            parts = await asyncio.gather(*(made.read(*key, "up") for key in keys))
            assert parts == [on_disk(pack.locate(*key, "up")) for key in keys]
            assert await made.read(0, 1, family="ffn_exps") == on_disk(pack.locate(0, 1))
            buffers = [bytearray(b"\xaa" * (1 << 16)) for _ in keys]
            pairs = zip(buffers, keys, strict=True)
            lengths = await asyncio.gather(*(made.read_into(b, *key) for b, key in pairs))
            for key, buffer, length in zip(keys, buffers, lengths, strict=True):
                assert buffer[:length] == on_disk(pack.locate(*key))
                assert set(buffer[length:]) == {0xAA}
            memory = mmap.mmap(-1, 1 << 16)
            assert await made.read_into(memory, 1, 2, "down") == pack.locate(1, 2, "down").length
            assert memory[: pack.locate(1, 2, "down").length] == on_disk(pack.locate(1, 2, "down"))
            now = made.statistics
            assert now.read_count == 32 * 3 + 2
            assert now.seconds > 0
        assert made.statistics.in_flight_count == 0

    run(work)


@pytest.mark.parametrize("in_order", [True, False])
def test_read_many_gives_all_in_the_order_asked_or_as_they_come(
    pack: Pack, name: str, in_order: bool
) -> None:
    choice = random.Random(5)
    keys = keys_of(pack) + [(0, 0)] * 2
    choice.shuffle(keys)

    async def work() -> None:
        backend = FaultyBackend(make(name), shuffle=choice.shuffle)
        async with AsyncReader(pack, backend=backend, depth=6) as made:
            assert (made.backend, made.why) == (name, "given by the caller")
            numbers = []
            async for one in made.read_many(keys, in_order=in_order):
                numbers.append(one.number)
                assert one.view == on_disk(pack.locate(*keys[one.number]))
                assert one.part("up") == on_disk(pack.locate(*keys[one.number], "up"))
                one.release()
            assert sorted(numbers) == list(range(len(keys)))
            if in_order:
                assert numbers == sorted(numbers)
            some = made.read_many(iter(keys[:3]), parts=("down", "gate"), in_order=in_order)
            async for one in some:
                for part in ("gate", "down"):
                    assert one.part(part) == on_disk(pack.locate(*keys[one.number], part))
            async for _ in made.read_many([], in_order=in_order):
                pytest.fail("no keys, no experts")
        assert backend.is_closed
        assert backend.peak_count <= 6

    run(work)


def test_an_expert_that_is_late_keeps_back_no_other(pack: Pack, name: str) -> None:
    async def work() -> None:
        others_came = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 0, until=others_came))
        async with AsyncReader(pack, backend=backend) as made:
            numbers = []
            async for one in made.read_many([(0, n) for n in range(4)], in_order=False):
                numbers.append(one.number)
                if len(numbers) == 3:
                    others_came.set()
            assert numbers[3] == 0

    run(work)


def test_read_many_reads_into_the_callers_buffers(pack: Pack, name: str) -> None:
    async def work() -> None:
        buffers = [bytearray(1 << 16) for _ in range(4)]
        async with AsyncReader(pack, backend=name) as made:
            async for one in made.read_many([(0, n) for n in range(4)], into=buffers):
                length = len(one.view)
                assert buffers[one.number][:length] == on_disk(pack.locate(0, one.number))

    run(work)


def test_several_at_a_time_stay_within_the_bounds(pack: Pack, name: str) -> None:
    async def work() -> None:
        backend = FaultyBackend(make(name), Fault(delay=0.001))
        async with AsyncReader(pack, backend=backend, depth=9, max_in_flight=100_000) as made:
            views = await asyncio.gather(*(made.read(*key) for key in keys_of(pack) * 2))
            assert views == [on_disk(pack.locate(*key)) for key in keys_of(pack) * 2]
        assert 1 < backend.peak_count <= 9
        assert backend.peak_length <= 100_000

    run(work)


def test_errors_come_in_their_turn_and_the_reader_goes_on(pack: Pack, name: str) -> None:
    async def work() -> None:
        faults = [
            fault_at(pack, 0, 2, code=errno.EIO),
            fault_at(pack, 0, 4, missing=1),
            fault_at(pack, 0, 6, flip=0),
        ]
        async with AsyncReader(pack, backend=FaultyBackend(make(name), *faults)) as made:
            calls = (made.read(0, n) for n in range(8))
            results = await asyncio.gather(*calls, return_exceptions=True)
            for number, result in enumerate(results):
                if number not in (2, 4, 6):
                    assert result == memoryview(on_disk(pack.locate(0, number)))
            place = f"layer 0 expert 2 blob at byte {pack.locate(0, 2).offset:,}"
            path = pack.locate(0, 2).path
            assert str(results[2]) == f"{path}: {place}: cannot read: {os.strerror(errno.EIO)}"
            assert isinstance(results[2], MachineError)
            assert "layer 0 expert 4 blob" in str(results[4])
            assert isinstance(results[4], PackError)
            assert "expert 6 ffn_gate_exps.weight" in str(results[6])
            with pytest.raises(MachineError, match="layer 0 expert 2"):
                await made.read_into(bytearray(1 << 16), 0, 2)
            for in_order in (True, False):
                came: list[int | str] = []
                try:
                    async for one in made.read_many([(0, n) for n in range(8)], in_order=in_order):
                        came.append(one.number)
                except MoepackError as error:
                    came.append(str(error.place).partition(" at ")[0])
                if in_order:
                    assert came == [0, 1, "layer 0 expert 2 blob"]
                else:
                    assert str(came[-1]).startswith("layer 0 expert")
            await the_rest_reads_right(pack, made, (0, 2), (0, 4), (0, 6))

    run(work)


def test_what_is_not_there_is_refused_before_anything_is_read(pack: Pack, name: str) -> None:
    async def work() -> None:
        backend = FaultyBackend(make(name))
        async with AsyncReader(pack, backend=backend) as made:
            with pytest.raises(RequestError, match="no expert 16"):
                await made.read(0, 16)
            with pytest.raises(RequestError, match="no part sideways"):
                await made.read(0, 1, "sideways")
            with pytest.raises(RequestError, match="does not fit"):
                await made.read_into(bytearray(10), 0, 1)
            with pytest.raises(RequestError, match="no expert 77"):
                await anext(aiter(made.read_many([(0, 1), (0, 77)])))
            with pytest.raises(RequestError, match="no parts were asked for"):
                await anext(aiter(made.read_many([(0, 1)], parts=())))
            assert backend.begun == []
            await the_rest_reads_right(pack, made, errors=0)

    run(work)


def test_a_missing_file_is_an_error_of_its_reads(pack_copy: Path, name: str) -> None:
    async def work() -> None:
        with moepack.open(pack_copy) as opened:
            opened.locate(1, 0).path.unlink()
            async with AsyncReader(opened, backend=name) as made:
                calls = (made.read(layer, 0) for layer in (1, 0, 1))
                results = await asyncio.gather(*calls, return_exceptions=True)
                assert results[1] == memoryview(on_disk(opened.locate(0, 0)))
                assert ["missing" in str(result) for result in results[::2]] == [True, True]

    run(work)


# Cancellation


def test_a_cancelled_read_ends_before_its_memory_is_the_callers(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, until=gate))
        async with AsyncReader(pack, backend=backend) as made:
            buffer = bytearray(1 << 16)
            task = asyncio.create_task(made.read_into(buffer, 0, 1))
            await until(lambda: backend.begun)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.05)
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


def test_a_read_that_is_cancelled_twice_ends_first_as_well(pack: Pack) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 1, until=gate))
        async with AsyncReader(pack, backend=backend) as made:
            task = asyncio.create_task(made.read_into(bytearray(1 << 16), 0, 1))
            await until(lambda: backend.begun)
            try:
                for _ in range(2):
                    task.cancel()
                    done, _ = await asyncio.wait([task], timeout=0.02)
                    assert not done
            finally:
                gate.set()

    run(work)


def test_a_loop_over_experts_that_is_cancelled_twice_harms_no_other_read(
    packs: dict[str, Path],
) -> None:
    """In a process of its own, that can be stopped: closing the reader would never end."""
    code = """
        import asyncio, sys, threading, moepack, moepack.aio
        from tests.support.faulty_backend import Fault, FaultyBackend, make

        async def main():
            asyncio.get_running_loop().slow_callback_duration = 10  # the machine may be busy
            gate = threading.Event()
            backend = FaultyBackend(make("buffered"), Fault(until=gate))
            with moepack.open(sys.argv[1]) as pack:
                async with moepack.aio.Reader(pack, backend=backend) as reader:
                    async def loop():
                        async for _ in reader.read_many([(0, 1), (0, 2)]):
                            pass
                    task = asyncio.create_task(loop())
                    await asyncio.sleep(0.01)
                    other = asyncio.create_task(reader.read(0, 1))
                    await asyncio.sleep(0.01)
                    for _ in range(2):
                        task.cancel()
                        await asyncio.wait([task], timeout=0.02)
                    gate.set()
                    await asyncio.wait([task])
                    await other

        asyncio.run(main())
    """
    in_development(code, packs["qwen3moe"])


def test_a_cancelled_read_that_fails_leaves_no_complaint(pack: Pack) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make("buffered"), fault_at(pack, 0, 1, until=gate, code=errno.EIO))
        async with AsyncReader(pack, backend=backend) as made:
            task = asyncio.create_task(made.read(0, 1))
            await until(lambda: backend.begun)
            task.cancel()
            await asyncio.sleep(0.01)
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task

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
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.03)
            assert not done
            assert not any(buffers[3])
            gate.set()
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


def test_a_timeout_is_a_cancellation(pack: Pack, name: str) -> None:
    async def work() -> None:
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, delay=0.05))
        async with AsyncReader(pack, backend=backend) as made:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.read(0, 1), 0.01)
            assert made.statistics.in_flight_count == 0
            assert await made.read(0, 1) == on_disk(pack.locate(0, 1))

    run(work)


# The loop and the threads


def test_the_loop_goes_on_while_reads_are_in_flight(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                if ticks == 20:
                    gate.set()
                await asyncio.sleep(0.001)

        backend = FaultyBackend(make(name), Fault(until=gate))
        async with AsyncReader(pack, backend=backend, depth=2) as made:
            ticker = asyncio.create_task(tick())
            views = await asyncio.gather(*(made.read(0, n) for n in range(3)))
            ticker.cancel()
        assert ticks >= 20
        assert views == [on_disk(pack.locate(0, n)) for n in range(3)]

    run(work)


def test_a_waiting_loop_sleeps(pack: Pack, name: str) -> None:
    """It is told when a read ends, and does not ask again and again."""

    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, until=gate))
        async with AsyncReader(pack, backend=backend) as made:
            calls = 0
            take = made._scheduler.take

            def counted(*, wait: bool) -> Any:
                nonlocal calls
                calls += 1
                return take(wait=wait)

            made._scheduler.take = counted  # type: ignore[method-assign]
            task = asyncio.create_task(made.read(0, 1))
            await asyncio.sleep(0.05)
            gate.set()
            await task
            assert 1 <= calls <= 5

    run(work)


def test_uring_needs_no_threads(pack: Pack) -> None:
    require("uring", pack.path)

    async def work() -> None:
        before = threading.active_count()
        async with AsyncReader(pack, backend="uring") as made:
            await the_rest_reads_right(pack, made)
            tasks = [asyncio.create_task(made.read(0, n)) for n in range(16)]
            await asyncio.sleep(0)
            assert threading.active_count() == before
            await asyncio.gather(*tasks)
        assert threading.active_count() == before

    run(work)


def test_nothing_stays_open(pack: Pack, name: str) -> None:
    async def work() -> None:
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(3):
            async with AsyncReader(pack, backend=name, depth=3) as made:
                await the_rest_reads_right(pack, made)
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before

    run(work)


def test_a_reader_that_cannot_be_made_leaves_nothing_open(pack: Pack) -> None:
    async def work() -> None:
        backend = FaultyBackend(make("buffered"), queue_codes=[errno.EMFILE])
        with pytest.raises(MachineError, match="Too many open files"):
            AsyncReader(pack, backend=backend)
        assert backend.is_closed

    run(work)


def test_a_reader_is_made_inside_of_a_loop(pack: Pack) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncReader(pack)


# Closing


def test_closing_waits_for_what_was_asked_for(pack: Pack, name: str) -> None:
    async def work() -> None:
        gate = threading.Event()
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, until=gate))
        made = AsyncReader(pack, backend=backend, depth=1)
        tasks = [asyncio.create_task(made.read(0, n)) for n in (1, 2, 3)]
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
        await made.close()

    run(work)


def test_closing_waits_for_what_fails_as_well(pack: Pack, name: str) -> None:
    async def work() -> None:
        backend = FaultyBackend(make(name), fault_at(pack, 0, 1, delay=0.01, code=errno.EIO))
        made = AsyncReader(pack, backend=backend)
        task = asyncio.create_task(made.read(0, 1))
        await until(lambda: backend.begun)
        await made.close()
        with pytest.raises(MachineError, match="layer 0 expert 1"):
            await task

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


def test_a_closed_reader_refuses_every_call(pack: Pack, name: str) -> None:
    async def work() -> None:
        made = AsyncReader(pack, backend=name)
        many = made.read_many([(0, 0)])
        await made.close()
        await made.close()
        calls = (made.read(0, 0), made.read_into(bytearray(1 << 16), 0, 0), anext(aiter(many)))
        for call in calls:
            with pytest.raises(RequestError, match=rf"{re.escape(str(pack.path))}: .* closed"):
                await call

    run(work)


# Memory that runs out


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_that_cannot_be_had_at_once_is_one_reads_error(
    pack: Pack, name: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with AsyncReader(pack, backend=name) as made:
            no_memory = MachineError("cannot allocate it (out of memory)")
            fail_allocation(monkeypatch, Arena, "take", failing, no_memory)
            calls = (made.read(0, n) for n in range(3))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[failing], MachineError)
            assert f"layer 0 expert {failing} blob" in str(results[failing])
            assert results[2] == memoryview(on_disk(pack.locate(0, 2)))
            monkeypatch.undo()
            await the_rest_reads_right(pack, made, errors=0)

    run(work)


def test_memory_that_cannot_be_had_later_is_one_reads_error(packs: dict[str, Path]) -> None:
    """In a process of its own, that can be stopped: who waits for it waits for ever."""
    code = """
        import asyncio, sys, moepack, moepack.aio
        from moepack.storage.arena import Arena
        from tests.support.faulty_backend import Fault, FaultyBackend, make

        def refuse(*_):
            raise moepack.MachineError("cannot allocate")

        async def main():
            backend = FaultyBackend(make("buffered"), Fault(delay=0.05))
            with moepack.open(sys.argv[1]) as pack:
                async with moepack.aio.Reader(pack, backend=backend, depth=1) as reader:
                    first = asyncio.create_task(reader.read(0, 0))
                    second = asyncio.create_task(reader.read(0, 1))
                    await asyncio.sleep(0.01)
                    Arena.take = refuse
                    await first
                    try:
                        await second
                    except moepack.MachineError:
                        return
            raise AssertionError("no error")

        asyncio.run(main())
    """
    in_development(code, packs["qwen3moe"])


# In a process of its own, where every warning is an error


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
    in_development(code, packs["qwen3moe"], name)
