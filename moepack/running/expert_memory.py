"""The memory in which llama.cpp looks for experts: private pages, there where they were brought in.

Pages that nothing was written to take no memory, so a model may be far larger than it. An expert
that is given up gives back the pages that are its own alone; the first and last of each part may
hold the edge of a neighbour, and stay.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from moepack.sizes import align

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FLAGS = _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE


class Span(NamedTuple):
    """Some bytes of the experts' memory: where they begin, from its start, and how many."""

    offset: int
    length: int


class ExpertMemory:
    """Lays anonymous memory over `length` bytes from `address` on, which starts on a page.

    What was mapped there is not seen any more, and is unmapped by whoever mapped it, with this.
    Raises OSError.
    """

    def __init__(self, address: int, length: int) -> None:
        assert address % _PAGE == 0
        libc = _libc()
        self._address, self._length = address, align(length, _PAGE)
        found = libc.mmap(address, self._length, _PROTECTION, _FLAGS, -1, 0)
        if found == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        assert found == address

    def view(self, span: Span) -> memoryview:
        """Return writable bytes of it, valid as long as they are mapped."""
        assert 0 <= span.offset <= self._length - span.length
        array = (ctypes.c_char * span.length).from_address(self._address + span.offset)
        return memoryview(array).cast("B")

    def give_back(self, spans: Iterable[Span]) -> None:
        """Give the pages back that lie in `spans` alone; they read as zeros. Raises OSError."""
        madvise = _libc().madvise
        for span in spans:
            start = align(span.offset, _PAGE)
            end = (span.offset + span.length) // _PAGE * _PAGE
            if start < end and madvise(self._address + start, end - start, mmap.MADV_DONTNEED):
                code = ctypes.get_errno()
                if code != errno.EAGAIN:
                    raise OSError(code, os.strerror(code))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
