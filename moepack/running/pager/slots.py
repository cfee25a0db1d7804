"""The memory for experts: slots of a file without a name, which programs map."""

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

from moepack.running.pager.huge_pages import HUGE_PAGE, HugePages
from moepack.storage import blocks

_LEAST_HUGE = HUGE_PAGE // 4
"""For shorter slots a huge page would be memory that may never be used."""


class SlotPool:
    """Slots of the given lengths, each a multiple of a page; as many of each as `lengths` has.

    Only slots that are or were allocated take memory. Released ones keep it for the next experts,
    as new pages are filled with zeros first. Raises OSError.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        counts = Counter(lengths)
        self._next: dict[int, int] = {}
        end = 0
        for length, count in counts.items():
            self._next[length] = end
            end += length * count
        self._spare: dict[int, list[int]] = {length: [] for length in counts}
        self._unused: dict[int, list[int]] = {length: [] for length in counts}
        self.spare_length = 0
        """The bytes of released slots that have memory."""
        self.descriptor = os.memfd_create("moepack-experts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, max(end, mmap.PAGESIZE))
            self._memory = mmap.mmap(self.descriptor, max(end, mmap.PAGESIZE))
            self._huge_pages = HugePages(self.descriptor, end)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.view = memoryview(self._memory)

    def allocate(self, length: int) -> int:
        """Allocate a slot; return its offset in the pool."""
        if self._spare[length]:
            self.spare_length -= length
            return self._spare[length].pop()
        if self._unused[length]:
            return self._unused[length].pop()
        offset = self._next[length]
        self._next[length] += length
        if length >= _LEAST_HUGE:
            self._huge_pages.fill(offset, length)
        return offset

    def missing_counts(self, counts: Mapping[int, int], limit: int) -> dict[int, int]:
        """Return by length how many slots are missing for `counts`.

        The pool may have `limit` bytes more than it has now.
        """
        missing: dict[int, int] = {}
        for length, count in counts.items():
            needed = max(0, count - len(self._spare[length]))
            new = min(needed, max(0, limit) // length)
            limit -= new * length
            if needed > new:
                missing[length] = needed - new
        return missing

    def release(self, offset: int, length: int) -> None:
        """Release a slot that no program maps any more."""
        self._spare[length].append(offset)
        self.spare_length += length

    def trim(self, limit: int) -> None:
        """Free the memory of spare slots beyond `limit` bytes."""
        for length, offsets in self._spare.items():
            while offsets and self.spare_length > limit:
                offset = offsets.pop(0)
                blocks.punch(self.descriptor, offset, length)
                self.spare_length -= length
                self._unused[length].append(offset)

    def close(self) -> None:
        """Free all memory, but for mappings of programs."""
        self.view.release()
        os.close(self.descriptor)
        with suppress(BufferError):  # whoever keeps an error keeps what its frames had of this
            self._memory.close()
