"""Memory to read into: who views a block has it alone; nothing is kept beyond a bound."""

import gc
import mmap
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moepack.common.errors import MachineError, RequestError
from moepack.storage.arena import Arena
from moepack.storage.buffers import writable_bytes

MIB = 1 << 20


def address(view: memoryview) -> int:
    """Return the address of a buffer."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def memory_lengths() -> tuple[int, int]:
    """Return the bytes of addresses that this process has, and of memory behind them."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * mmap.PAGESIZE, int(pages[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 300_000, MIB, 17 * MIB + 1])
def test_a_block_is_as_long_as_asked_and_begins_on_a_page(length: int) -> None:
    view = Arena(MIB).allocate(length)
    assert (len(view), view.format, view.readonly) == (length, "B", False)
    assert address(view) % mmap.PAGESIZE == 0
    view[0] = view[-1] = 7


@pytest.mark.parametrize(
    "keep_a_view",
    [
        lambda view: view[10:20],
        lambda view: view.cast("I"),
        lambda view: np.frombuffer(view, np.uint8)[5:6],
        lambda view: memoryview(memoryview(view)),
        lambda view: (view for _ in range(1)),
    ],
)
def test_a_block_that_anything_views_is_nobody_elses(keep_a_view: object) -> None:
    arena = Arena(64 * MIB)
    view = arena.allocate(MIB)
    view[:] = b"\x01" * MIB
    first = address(view)
    kept = keep_a_view(view)  # type: ignore[operator]
    del view
    others = [arena.allocate(MIB) for _ in range(5)]
    for other in others:
        other[:] = b"\x02" * MIB
    assert first not in map(address, others)
    assert arena.kept_length == 0
    del kept
    gc.collect()
    assert address(arena.allocate(MIB)) == first


def test_what_comes_back_beyond_the_bound_goes_to_the_system() -> None:
    """As it is dropped: nobody has to call anything again."""
    arena = Arena(8 * MIB)
    views = [arena.allocate(4 * MIB) for _ in range(30)]
    for view in views:
        view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)
    before = memory_lengths()[1]
    views.clear()
    del view
    assert arena.kept_length == 8 * MIB
    assert memory_lengths()[1] < before - 100 * MIB


def test_memory_goes_with_the_arena_and_its_last_block() -> None:
    """Without the collector of circles, which may not come for long."""
    gc.collect()
    gc.disable()
    try:
        before = memory_lengths()[0]
        arena = Arena(64 * MIB)
        views = [arena.allocate(16 * MIB) for _ in range(8)]
        views.pop()
        del arena
        assert memory_lengths()[0] >= before + 7 * 16 * MIB
        views.clear()
        assert memory_lengths()[0] < before + MIB
    finally:
        gc.enable()


def test_threads_never_get_the_same_block() -> None:
    arena = Arena(2 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        choice = random.Random(mark)
        for _ in range(200):
            view = arena.allocate(choice.choice((5000, 70_000, 70_001)))
            view[:] = bytes([mark]) * len(view)
            if bytes(view) != bytes([mark]) * len(view):
                wrong.append(mark)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(1, 7)))
    assert not wrong


@pytest.mark.parametrize("length", [1 << 62, 1 << 80])
def test_memory_that_there_is_not_is_the_machines_fault(length: int) -> None:
    with pytest.raises(MachineError, match="cannot allocate"):
        Arena(MIB).allocate(length)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_huge_pages_are_asked_for() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no huge pages")
    view = Arena(MIB).allocate(16 * MIB)
    view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)
    entry = re.compile(r"^(\w+)-(\w+) .*?^AnonHugePages: +(\d+)", re.MULTILINE | re.DOTALL)
    for start, end, length in entry.findall(Path("/proc/self/smaps").read_text()):
        if int(start, 16) <= address(view) < int(end, 16):
            assert int(length) >= 8 * 1024
            return
    pytest.fail("the memory is not mapped")


class Tensor:
    """Holds an array as tensors of torch do: without a buffer of its own."""

    def numpy(self) -> NDArray[np.uint8]:
        return np.zeros(8, np.uint8)


def test_a_tensor_is_refused_with_what_is_its_memory() -> None:
    with pytest.raises(RequestError, match="not a contiguous buffer") as caught:
        writable_bytes(Tensor(), 8)
    assert ".numpy()" in (caught.value.hint or "")
    assert len(writable_bytes(Tensor().numpy(), 8)) == 8


def test_what_is_no_tensor_gets_no_hint_for_one() -> None:
    with pytest.raises(RequestError) as caught:
        writable_bytes("text", 1)
    assert caught.value.hint is None
