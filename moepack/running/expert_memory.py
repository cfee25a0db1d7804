"""The memory in which llama.cpp looks for experts: private pages, there where they were brought in.

Pages that nothing was written to take no memory, so a model may be far larger than it. An expert
that is given up leaves the pages that are its own alone; the first and last of each part may hold
the edge of a neighbour, and stay.

Pages are moved to where the next expert is read, from where one was given up, or from a supply of
huge pages. Fresh ones would be filled with zeros first, which takes as long as reading them; and a
drive reads twice as fast into pages that lie side by side, as those of a huge one do.
"""

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moepack.sizes import align

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FLAGS = _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MOVE_FLAGS = 1 | 2 | 4
"""MREMAP_MAYMOVE, MREMAP_FIXED and MREMAP_DONTUNMAP (Linux 5.7)."""
_MADV_POPULATE_WRITE = 23
_SUPPLY_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_HUGE_PAGE = 2 << 20
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE
_MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")


class Span(NamedTuple):
    """Some bytes of the experts' memory: where they begin, from its start, and how many."""

    offset: int
    length: int


class ExpertMemory:
    """Lays anonymous memory over `length` bytes from `address` on, which starts on a page.

    What was mapped there is not seen any more, and is unmapped by whoever mapped it, with this.
    Its methods raise OSError.
    """

    def __init__(self, address: int, length: int) -> None:
        assert address % _PAGE == 0
        self._address, self._length = address, align(length, _PAGE)
        self._spare: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """By their length, where spare pages begin."""
        self.spare_length = 0
        """The bytes of all spare pages."""
        self._supply: mmap.mmap | None = None
        self._supply_start = self._supply_end = 0
        # Each place that pages were moved to is a mapping of its own, of which a process may have
        # so many only. An eighth is taken: beside each may lie one to which none were moved, and
        # there may be another model.
        self._moved: set[int] = set()
        self._most_moved = _most_mappings() // 8
        self._clear(0, self._length)

    def view(self, span: Span) -> memoryview:
        """Return writable bytes of it, valid as long as they are mapped."""
        assert 0 <= span.offset <= self._length - span.length
        array = (ctypes.c_char * span.length).from_address(self._address + span.offset)
        return memoryview(array).cast("B")

    def supply(self, length: int) -> None:
        """Have so many bytes in huge pages, to be taken first, where the system has any.

        What is released of one may stay in memory until the system needs some: for experts that go
        and come in the same sizes.
        """
        try:
            self._supply = mmap.mmap(-1, length + _HUGE_PAGE, flags=_SUPPLY_FLAGS)
            self._supply.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._supply))
        self._supply_start = align(start, _HUGE_PAGE)
        self._supply_end = self._supply_start + length

    def give_back(self, spans: Iterable[Span]) -> None:
        """Let go of the pages that lie in `spans` alone; they are spare then."""
        for offset, length in _pages(spans):
            if offset not in self._spare[length]:
                self._spare[length][offset] = None
                self.spare_length += length

    def take(self, spans: Iterable[Span], kept_length: int = 0) -> None:
        """Have pages at `spans`: spare ones where as many lie together as one needs, or new ones.

        Their bytes are anything then. Nothing is held there yet, or it was given back. Before there
        are new ones, spare pages beyond `kept_length` bytes go back to the system.
        """
        lacking = [span for span in _pages(spans) if not self._take_spare(*span)]
        self.release(kept_length)
        for offset, length in lacking:
            if self._supply_start + length <= self._supply_end:
                self._draw(offset, length)

    def _take_spare(self, offset: int, length: int) -> bool:
        spare = self._spare[length]
        if not spare:
            return False
        self.spare_length -= length
        if offset in spare:
            del spare[offset]
            return True
        source = spare.popitem()[0]
        moved = self._move(self._address + source, offset, length, source in self._moved)
        # What pages were moved from would stay a mapping of its own.
        self._clear(source, length)
        return moved

    def release(self, kept_length: int = 0) -> None:
        """Give spare pages back to the system, all but `kept_length` bytes of them."""
        for length, spare in self._spare.items():
            while spare and self.spare_length > kept_length:
                self.spare_length -= length
                self._clear(spare.popitem()[0], length)

    def _draw(self, offset: int, length: int) -> None:
        """Move pages of the supply."""
        start = self._supply_start
        populated = _libc().madvise(start, length, _MADV_POPULATE_WRITE) == 0  # Linux 5.14
        if populated and self._move(start, offset, length):
            self._supply_start += length
        else:
            self._supply_end = 0

    def _move(self, start: int, offset: int, length: int, frees_one: bool = False) -> bool:
        """Move pages from the address `start` to `offset`; False where the system does not."""
        if len(self._moved) - frees_one >= self._most_moved:
            return False
        wanted = self._address + offset
        if _libc().mremap(start, length, length, _MOVE_FLAGS, wanted) == _FAILED:
            self._most_moved = 0  # an older system, or one that is out of mappings
            self._clear(offset, length)
            return False
        self._moved.add(offset)
        return True

    def _clear(self, offset: int, length: int) -> None:
        """Have memory there that nothing was written to."""
        address = self._address + offset
        if _libc().mmap(address, length, _PROTECTION, _FLAGS, -1, 0) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        # A huge page would take memory for what is not held. A kernel without them says EINVAL.
        _libc().madvise(address, length, mmap.MADV_NOHUGEPAGE)
        self._moved.discard(offset)


def _pages(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the whole pages that lie in each span, if any."""
    for span in spans:
        start = align(span.offset, _PAGE)
        end = (span.offset + span.length) // _PAGE * _PAGE
        if start < end:
            yield Span(start, end - start)


def _most_mappings() -> int:
    try:
        return int(_MAX_MAPPINGS.read_text())
    except (OSError, ValueError):
        return 0


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = pointer, size, number, number, number, ctypes.c_long
    libc.mremap.argtypes = pointer, size, size, number, pointer
    libc.madvise.argtypes = pointer, size, number
    return libc
