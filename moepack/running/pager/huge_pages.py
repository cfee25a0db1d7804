"""Huge pages for a file in memory: a drive reads twice as fast into adjacent pages."""

import ctypes
import mmap
from functools import cache
from typing import Any

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
"""Linux 6.1; independent of the settings in /sys/kernel/mm/transparent_hugepage."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


class HugePages:
    """Huge pages for `descriptor`, a file in memory of `length` bytes, as far as there are any.

    Without them, pages of the usual size come when they are written.
    """

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor = descriptor
        self._count = length // HUGE_PAGE
        self._filled: set[int] = set()

    def fill(self, offset: int, length: int) -> None:
        """Allocate memory for bytes of the file that were never written, and beside them."""
        first, last = offset // HUGE_PAGE, (offset + length - 1) // HUGE_PAGE
        for number in range(first, min(last + 1, self._count)):
            if number not in self._filled:
                self._filled.add(number)
                self._collapse(number * HUGE_PAGE)

    def _collapse(self, offset: int) -> None:
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = libc.mmap(None, 2 * HUGE_PAGE, 0, flags, -1, 0)
        if start == _FAILED:
            return
        address = -(-start // HUGE_PAGE) * HUGE_PAGE
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address, HUGE_PAGE, protection, flags, self._descriptor, offset) != _FAILED:
            libc.memset(address, 0, 1)  # it refuses to collapse a range without any page
            libc.madvise(address, HUGE_PAGE, _MADV_COLLAPSE)
        libc.munmap(start, 2 * HUGE_PAGE)


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
