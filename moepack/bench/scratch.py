"""Memory that all sides of a comparison read into: the same buffers, on the same kind of page.

A read into small pages takes the kernel several times as long as one into huge pages, so that two
sides whose pages differ compare the pages.
"""

import ctypes
import mmap
import re
from pathlib import Path

from moepack.sizes import align
from moepack.storage.buffers import allocate_huge

HUGE_PAGE = 2 << 20
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ")


class Scratch:
    """`count` buffers of `length` bytes or a little more, which begin on pages, in one mapping.

    Anonymous and private; the system is asked for huge pages, and each page was written to before
    anything is read into it. Raises MachineError where there is no memory.
    """

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, align(length, mmap.PAGESIZE)
        total = align(count * self.length, HUGE_PAGE)
        area = allocate_huge(total + HUGE_PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._start = align(first, HUGE_PAGE)
        self._end = self._start + total
        memory = memoryview(area)[self._start - first :][:total]
        for at in range(0, total, mmap.PAGESIZE):
            memory[at] = 0
        self.buffers = [memory[n * self.length :][: self.length] for n in range(count)]

    def huge_page_share(self) -> float | None:
        """Return which share of the buffers lies in huge pages; None where the system does not say.

        By `AnonHugePages` in /proc/self/smaps (proc_pid_smaps(5)).
        """
        try:
            lines = Path("/proc/self/smaps").read_bytes().splitlines()
        except OSError:
            return None
        huge = inside = 0
        for line in lines:
            if found := _MAPPING.match(line):
                start, end = (int(text, 16) for text in found.groups())
                inside = min(end, self._end) - max(start, self._start)
            elif inside > 0 and line.startswith(b"AnonHugePages:"):
                # A mapping may be joined with its neighbours, which are not ours.
                huge += min(int(line.split()[1]) << 10, inside)
        return huge / (self._end - self._start)
