"""The page cache: the share of a file that lies in it, and dropping a file from it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from moepack.common.sizes import divide_up
from moepack.storage import libc
from moepack.storage.regular_file import open_regular

_WINDOW = 1 << 30
"""Bytes looked at in one call: a file may be larger than the longest possible mapping."""


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to drop its cached pages of files, as far as it can and will.

    Dirty and mapped pages stay, as does all of a file system that lies in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with open(path, "rb", opener=open_regular) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Iterable[Path]) -> float | None:
    """Return the share of the files' pages that is cached; None if the system does not tell."""
    cached = pages = 0
    try:
        for path in paths:
            size = path.stat().st_size
            with open(path, "rb", opener=open_regular) as file:
                for start in range(0, size, _WINDOW):
                    flags = _resident(file.fileno(), start, min(_WINDOW, size - start))
                    cached += len(flags) - flags.count(0)
                    pages += len(flags)
    except (OSError, ValueError):
        return None
    return cached / max(pages, 1)


def _resident(descriptor: int, start: int, length: int) -> bytes:
    """Return a byte for each page of a range, 0 for one that is not cached (mincore(2))."""
    mincore = libc.function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    if mincore is None:
        raise OSError("this system has no mincore")
    flags = ctypes.create_string_buffer(divide_up(length, mmap.PAGESIZE))
    # A private mapping, since ctypes gives addresses of writable memory alone.
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start) as area:
        first = ctypes.c_char.from_buffer(area)
        has_failed = mincore(ctypes.addressof(first), length, flags)
        del first  # it keeps the mapping open
    if has_failed:
        raise libc.last_error()
    return flags.raw
