"""Memory that comes back: who views a block has it alone; nothing is kept beyond a bound."""

import gc
import mmap
import random
import threading
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from moepack.errors import MachineError
from moepack.storage import arena as module
from moepack.storage.arena import Arena

MIB = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def resident() -> int:
    """Count the bytes of memory that this process has."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def mapping_length() -> int:
    """Count the bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 300_000, MIB, 17 * MIB + 1])
def test_a_block_is_as_long_as_asked_and_begins_on_a_page(length: int) -> None:
    view = Arena(MIB).take(length)
    assert (len(view), view.format, view.readonly) == (length, "B", False)
    assert address(view) % mmap.PAGESIZE == 0
    view[0] = view[-1] = 7


def test_a_dropped_block_is_used_again() -> None:
    arena = Arena(8 * MIB)
    view = arena.take(MIB)
    first = address(view)
    del view
    assert arena.kept_length == MIB
    assert address(arena.take(MIB - 5000)) == first
    assert arena.kept_length == MIB


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
    view = arena.take(MIB)
    view[:] = b"\x01" * MIB
    first = address(view)
    kept = keep_a_view(view)  # type: ignore[operator]
    del view
    others = [arena.take(MIB) for _ in range(5)]
    for other in others:
        other[:] = b"\x02" * MIB
    assert first not in map(address, others)
    assert arena.kept_length == 0
    del kept
    gc.collect()
    assert address(arena.take(MIB)) == first


def test_blocks_never_overlap() -> None:
    choice = random.Random(3)
    arena = Arena(4 * MIB)
    held: deque[tuple[memoryview, int]] = deque()
    for number in range(3000):
        view = arena.take(choice.randrange(1, 200_000))
        mark = number % 251
        view[:] = bytes([mark]) * len(view)
        held.append((view, mark))
        while len(held) > choice.randrange(1, 60):
            held.rotate(choice.randrange(5))
            old, expected = held.pop()
            assert bytes(old) == bytes([expected]) * len(old)


def test_what_comes_back_beyond_the_bound_goes_to_the_system() -> None:
    """As it is dropped: nobody has to call anything again."""
    arena = Arena(8 * MIB)
    views = [arena.take(4 * MIB) for _ in range(50)]
    for view in views:
        view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)
    held = resident()
    views.clear()
    del view
    assert arena.kept_length == 8 * MIB
    assert resident() < held - 180 * MIB


def test_addresses_are_used_again_however_often_the_bound_is_met() -> None:
    arena = Arena(0)
    arena.take(4 * MIB)
    before = mapping_length()
    for _ in range(200):
        view = arena.take(4 * MIB)
        view[0] = 1
        del view
    assert mapping_length() <= before + MIB


def test_memory_goes_with_the_arena_and_its_last_block() -> None:
    """Without the collector of circles, which may not come for long."""
    gc.collect()
    gc.disable()
    try:
        before = mapping_length()
        arena = Arena(64 * MIB)
        views = [arena.take(16 * MIB) for _ in range(8)]
        views.pop()
        del arena
        assert mapping_length() >= before + 7 * 16 * MIB
        views.clear()
        assert mapping_length() < before + MIB
    finally:
        gc.enable()


def test_a_closed_arena_keeps_nothing() -> None:
    arena = Arena(64 * MIB)
    view = arena.take(16 * MIB)
    arena.take(16 * MIB)
    arena.close()
    assert arena.kept_length == 0
    before = mapping_length()
    view[:5] = b"alive"
    del view
    assert mapping_length() <= before - 16 * MIB
    assert arena.kept_length == 0


def test_threads_never_get_the_same_block() -> None:
    arena = Arena(2 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        choice = random.Random(mark)
        for _ in range(800):
            view = arena.take(choice.choice((5000, 70_000, 70_001)))
            view[:] = bytes([mark]) * len(view)
            if bytes(view) != bytes([mark]) * len(view):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_finaliser_may_take_and_give_back_while_memory_is_cut() -> None:
    """Python runs finalisers in the midst of anything; none waits for a lock here."""
    arena = Arena(MIB)

    class Owner:
        pass

    for _ in range(50):
        owner = Owner()
        view = arena.take(100_000)
        weakref.finalize(owner, lambda kept: arena.take(len(kept)), view)
        del owner, view
    assert arena.kept_length <= MIB


@pytest.mark.parametrize("length", [1 << 62, 1 << 80])
def test_memory_that_there_is_not_is_the_machines_fault(length: int) -> None:
    with pytest.raises(MachineError, match="cannot allocate"):
        Arena(MIB).take(length)


def test_lengths_are_few_and_little_longer_than_asked() -> None:
    lengths = {module._block_length(length) for length in range(1, 64 * MIB, 4099)}
    assert len(lengths) < 120
    for length in (4096, 5000, 2_654_208, 4 * MIB, 16 * MIB, 123_456_789):
        assert length <= module._block_length(length) <= max(4096 + length, length * 9 // 8)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_huge_pages_are_asked_for() -> None:
    asked = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not asked.exists() or "[never]" in asked.read_text():
        pytest.skip("this system gives no huge pages")
    view = Arena(MIB).take(16 * MIB)
    view[:: mmap.PAGESIZE] = bytes(len(view) // mmap.PAGESIZE)
    assert any(int(line.split()[1]) >= 8 * 1024 for line in huge_lines(address(view)))


def huge_lines(where: int) -> list[str]:
    """Return what the system says of huge pages in the mapping that holds an address."""
    lines: list[str] = []
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_ours = start <= where < end
        elif is_ours and first == "AnonHugePages:":
            lines.append(line)
    return lines
