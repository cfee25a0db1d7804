"""Huge pages for a file in memory: a drive reads twice as fast into pages that lie side by side."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
"""Linux 6.1; takes no notice of what /sys/kernel/mm/transparent_hugepage says of shared memory."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value


class HugePages:
    """Gives huge pages to `descriptor`, a file in memory of `length` bytes, as far as there are.

    Where the system has none it gives nothing: pages of the usual size come when they are written.
    """

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor = descriptor
        self._count = length // HUGE_PAGE
        self._done: set[int] = set()

    def fill(self, offset: int, length: int) -> None:
        """Have memory for bytes of the file to which nothing was written yet, and beside them."""
        first, last = offset // HUGE_PAGE, (offset + length - 1) // HUGE_PAGE
        for number in range(first, min(last + 1, self._count)):
            if number not in self._done:
                self._done.add(number)
                self._collapse(number * HUGE_PAGE)

    def _collapse(self, offset: int) -> None:
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = libc.mmap(None, 2 * HUGE_PAGE, 0, flags, -1, 0)
        if room == _FAILED:
            return
        address = -(-room // HUGE_PAGE) * HUGE_PAGE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address, HUGE_PAGE, _PROTECTION, flags, self._descriptor, offset) != _FAILED:
            # Where nothing is yet it refuses: one page has to be there.
            libc.memset(address, 0, 1)
            libc.madvise(address, HUGE_PAGE, _MADV_COLLAPSE)
        libc.munmap(room, 2 * HUGE_PAGE)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = pointer, size, number, number, number, ctypes.c_int64
    libc.madvise.argtypes = pointer, size, number
    libc.munmap.argtypes = pointer, size
    libc.memset.argtypes = pointer, number, size
    return libc
