"""What of a file lies in the page cache, and getting it out of there."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from moepack.sizes import divide_up
from moepack.storage.regular_file import open_regular

_WINDOW = 1 << 30
"""Bytes that are asked for at a time: a file may be larger than what can be mapped."""


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to forget what it has cached of files, as far as it can and will.

    Dirty and mapped pages stay, as does all of a file system that lies in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with open(path, "rb", opener=open_regular) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Iterable[Path]) -> float | None:
    """Return which share of the files' pages is cached; None where the system does not tell."""
    cached = pages = 0
    for path in paths:
        try:
            cached_count, page_count = _count(path)
        except (OSError, AttributeError, ValueError):
            return None
        cached += cached_count
        pages += page_count
    return cached / max(pages, 1)


def _count(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are cached, and how many it has."""
    cached = pages = 0
    size = path.stat().st_size
    with open(path, "rb", opener=open_regular) as file:
        for start in range(0, size, _WINDOW):
            length = min(_WINDOW, size - start)
            # A private mapping, since ctypes gives addresses of writable memory alone.
            area = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
            flags = _resident(area, length)
            area.close()
            cached += len(flags) - flags.count(0)
            pages += len(flags)
    return cached, pages


def _resident(area: mmap.mmap, length: int) -> bytes:
    flags = ctypes.create_string_buffer(divide_up(length, mmap.PAGESIZE))
    first = ctypes.c_char.from_buffer(area)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    failed = mincore(ctypes.byref(first), ctypes.c_size_t(length), flags)
    code = ctypes.get_errno()
    del first  # it holds the mapping
    if failed:
        raise OSError(code or errno.EINVAL, os.strerror(code))
    return flags.raw
