"""How much of a mapping is in memory."""

import mmap

import numpy as np

PAGE = mmap.PAGESIZE


def resident_length(address: int, length: int) -> int:
    """Return how many bytes of a private mapping are in memory (proc_pid_pagemap(5))."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(length // PAGE * 8), "<u8")
    return int(np.count_nonzero(entries >> 62)) * PAGE
