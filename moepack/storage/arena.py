"""Memory that is used again: blocks of huge pages, free as soon as nothing views them any more.

New memory is expensive: the kernel clears each page when it is first touched, which takes longer
than a fast drive needs to fill it. Here a block is touched once. Its users keep it alive by their
views, however many and wherever these are, and need not release it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections import deque
from typing import Any

from moepack.common.sizes import align
from moepack.storage.buffers import allocate_huge

_MAPPING_LENGTH = 16 << 20
"""Bytes requested from the system at a time; untouched ones cost nothing."""

_Slot = tuple[mmap.mmap, int]
"""Memory for a block, by its mapping and its start in that."""


class Arena:
    """Memory to read into, for one reader and all of its threads.

    Up to `keep` bytes that nobody views stay ready; beyond that, blocks go back to the system at
    once. Memory in use has no bound here: it belongs to its users.

    Blocks come back from finalisers: in any thread, in the midst of anything, of this too. So there
    is no lock, and each step is one that no other thread can divide: of a deque, or of a dict. An
    arena does not refer to blocks in use: nothing here waits for the cyclic garbage collector.
    """

    def __init__(self, keep: int) -> None:
        self._keep: int | None = keep
        # Free slots by the length of their blocks: with memory behind them, and without.
        self._ready: dict[int, deque[_Slot]] = {}
        self._empty: dict[int, deque[_Slot]] = {}

    @property
    def kept_length(self) -> int:
        """Bytes that nobody views and that stay ready."""
        return sum(length * len(slots) for length, slots in tuple(self._ready.items()))

    def allocate(self, length: int) -> memoryview:
        """Return `length` bytes that begin on a page and that nobody else views.

        Their content is undefined. Raises MachineError if there is no memory.
        """
        block_length = _block_length(length)
        slot = self._free_slot(block_length) or self._new_slot(block_length)
        block = _block_type(block_length).from_buffer(*slot)
        block.home = (self, slot)
        return memoryview(block).cast("B")[:length]

    def give_back(self, length: int, slot: _Slot) -> None:
        """Take back a block of `length` bytes that nobody views any more; for its finaliser."""
        if self._keep is None:
            return
        free = self._ready
        if self.kept_length + length > self._keep:
            mapping, start = slot
            with contextlib.suppress(OSError):  # locked memory stays
                mapping.madvise(mmap.MADV_DONTNEED, start, length)
            free = self._empty
        free.setdefault(length, deque()).append(slot)

    def close(self) -> None:
        """Keep nothing any more; memory in use goes back to the system with its last view."""
        self._keep = None
        self._ready.clear()
        self._empty.clear()

    def _free_slot(self, length: int) -> _Slot | None:
        for free in (self._ready, self._empty):
            try:
                return free[length].pop()
            except LookupError:  # none of this length, now or ever
                continue
        return None

    def _new_slot(self, length: int) -> _Slot:
        count = max(1, _MAPPING_LENGTH // length)
        mapping = allocate_huge(count * length)
        others = [(mapping, number * length) for number in range(1, count)]
        self._empty.setdefault(length, deque()).extend(others)
        return mapping, 0


@functools.lru_cache(1024)
def _block_length(length: int) -> int:
    """Round up to pages, and by at most an eighth to one of few lengths: blocks fit others then."""
    return align(length, max(mmap.PAGESIZE, 1 << max(0, length.bit_length() - 4)))


@functools.cache
def _block_type(length: int) -> Any:
    """Return the type of blocks of this length: owners of their memory, which views keep alive.

    A memoryview has no finaliser. It refers to the object that it views, and that is one of ours.
    """

    def give_back(block: Any) -> None:
        arena, slot = block.home
        arena.give_back(length, slot)

    members = {"_type_": ctypes.c_char, "_length_": length, "__del__": give_back}
    return type("Block", (ctypes.Array,), members)
