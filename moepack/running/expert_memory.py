"""The memory in which llama.cpp looks for experts: private pages, there where they were brought in.

Pages that nothing was written to take no memory, so a model may be far larger than it. An expert
that is given up leaves the pages that are its own alone; the first and last of each part may hold
the edge of a neighbour, and stay. They are moved to where the next expert is read: fresh ones would
be filled with zeros first, which takes the system longer than the read itself.
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
        # Each place that pages were moved to is a mapping of its own, of which a process may have
        # so many only. A quarter is taken: beside each may lie one to which none were moved.
        self._moved: set[int] = set()
        self._most_moved = _most_mappings() // 4
        self._clear(0, self._length)

    def view(self, span: Span) -> memoryview:
        """Return writable bytes of it, valid as long as they are mapped."""
        assert 0 <= span.offset <= self._length - span.length
        array = (ctypes.c_char * span.length).from_address(self._address + span.offset)
        return memoryview(array).cast("B")

    def give_back(self, spans: Iterable[Span]) -> None:
        """Let go of the pages that lie in `spans` alone; they are spare then."""
        for offset, length in _pages(spans):
            if offset not in self._spare[length]:
                self._spare[length][offset] = None
                self.spare_length += length

    def take(self, spans: Iterable[Span]) -> None:
        """Have spare pages at `spans`, where there are as many together as one of them needs.

        Their bytes are anything then. Nothing is held there yet, or it was given back.
        """
        for offset, length in _pages(spans):
            spare = self._spare[length]
            if spare:
                self.spare_length -= length
                if offset in spare:
                    del spare[offset]
                else:
                    self._move(spare.popitem()[0], offset, length)

    def release(self, kept_length: int = 0) -> None:
        """Give spare pages back to the system, all but `kept_length` bytes of them."""
        for length, spare in self._spare.items():
            while spare and self.spare_length > kept_length:
                self.spare_length -= length
                self._clear(spare.popitem()[0], length)

    def _move(self, source: int, offset: int, length: int) -> None:
        if len(self._moved) - (source in self._moved) < self._most_moved:
            start, wanted = self._address + source, self._address + offset
            if _libc().mremap(start, length, length, _MOVE_FLAGS, wanted) != _FAILED:
                self._moved.add(offset)
            else:  # an older system, or one that is out of mappings
                self._most_moved = 0
                self._clear(offset, length)
        # Where pages were moved away as well: what they leave would stay a mapping of its own.
        self._clear(source, length)

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
