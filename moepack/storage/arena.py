"""Memory that comes back: blocks of huge pages, used again once nothing views them any more.

New memory is dear: the kernel clears each page when it is first touched, and that takes longer than
a fast drive needs to fill it. Here a block is touched once. Whoever gets one holds it by its views,
however many and wherever they are, and need not say when it is done with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections import deque
from typing import Any, NamedTuple

from moepack.sizes import align
from moepack.storage.buffers import allocate_huge

_MAPPING_LENGTH = 16 << 20
"""Bytes that are asked of the system at a time; what is never touched of them costs nothing."""


class _Place(NamedTuple):
    """Memory for a block: `start` counts from the start of the mapping."""

    mapping: mmap.mmap
    start: int


class Arena:
    """Memory to read into, for one reader and all of its threads.

    Up to `keep` bytes that nobody views are held ready; what comes back beyond that goes to the
    system at once. Memory that is in use has no bound here: it is its users'.

    Blocks come back from finalisers: in any thread, in the midst of anything, of this too. So there
    is no lock, and each step is one that no other thread can divide: of a deque, or of a dict. An
    arena holds no block that is in use: nothing here waits for the collector of circles.
    """

    def __init__(self, keep: int) -> None:
        self._keep: int | None = keep
        # Free places by the length of their blocks: with memory behind them, and without.
        self._ready: dict[int, deque[_Place]] = {}
        self._empty: dict[int, deque[_Place]] = {}

    @property
    def kept_length(self) -> int:
        """How many bytes are held ready."""
        kept = 0
        for length, places in tuple(self._ready.items()):
            kept += length * len(places)
        return kept

    def take(self, length: int) -> memoryview:
        """Return `length` bytes that begin on a page and that nobody else views.

        They hold whatever they held before. Raises MachineError where there is no memory.
        """
        block_length = _block_length(length)
        place = self._free_place(block_length) or self._new_place(block_length)
        block = _block_type(block_length).from_buffer(*place)
        block.home = (self, place)
        return memoryview(block).cast("B")[:length]

    def give_back(self, length: int, place: _Place) -> None:
        """Take back a block of `length` bytes that nobody views any more; for its finaliser."""
        if self._keep is None:
            return
        free = self._ready
        if self.kept_length + length > self._keep:
            with contextlib.suppress(OSError):  # locked memory stays
                place.mapping.madvise(mmap.MADV_DONTNEED, place.start, length)
            free = self._empty
        places = free.get(length)
        if places is None:
            places = free.setdefault(length, deque())
        places.append(place)

    def close(self) -> None:
        """Hold nothing any more; what is in use goes back to the system when it is dropped."""
        self._keep = None
        self._ready.clear()
        self._empty.clear()

    def _free_place(self, length: int) -> _Place | None:
        for free in (self._ready, self._empty):
            try:
                return free[length].pop()
            except LookupError:  # none of this length, now or ever
                continue
        return None

    def _new_place(self, length: int) -> _Place:
        count = max(1, _MAPPING_LENGTH // length)
        mapping = allocate_huge(count * length)
        first, *others = [_Place(mapping, number * length) for number in range(count)]
        self._empty.setdefault(length, deque()).extend(others)
        return first


@functools.lru_cache(1024)
def _block_length(length: int) -> int:
    """Round up to pages, and by at most an eighth to one of few lengths: blocks fit others then."""
    return align(length, max(mmap.PAGESIZE, 1 << max(0, length.bit_length() - 4)))


@functools.cache
def _block_type(length: int) -> Any:
    """Return the type of blocks of this length: owners of their memory, which views keep alive.

    A memoryview tells nobody when it goes. It holds what it views, and that is an object of ours.
    """
    members = {"_type_": ctypes.c_char, "_length_": length, "__del__": _give_back}
    return type("Block", (ctypes.Array,), members)


def _give_back(block: Any) -> None:
    arena, place = block.home
    arena.give_back(len(block), place)
