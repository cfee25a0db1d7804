"""How many bytes experts may take: what was given, or what is free, from second to second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moepack.errors import RequestError
from moepack.machine.memory_limits import spare_memory
from moepack.shape import ModelShape
from moepack.sizes import size_text

_PRESSURE = Path("/proc/pressure/memory")
_MOST_STALLED = 10.0
"""Percent of the last ten seconds in which something waited for memory (PSI, `some avg10`)."""
_SHRINK_SHARE = 8
"""An eighth of what is there goes when the system waits for memory."""
_LEAST_CHANGE = 64 << 20


class FreeMemory:
    """Follows what is free: grows where there is room, shrinks before the system suffers.

    `floor` is never gone below, `most` never beyond, in bytes.
    """

    def __init__(
        self,
        floor: int,
        most: int,
        spare: Callable[[], int] = spare_memory,
        pressure: Path = _PRESSURE,
    ) -> None:
        self._floor, self._most = floor, most
        self._spare, self._pressure = spare, pressure
        self.budget = self._bounded(spare())

    def follow(self, resident_length: int) -> int:
        """Look at the system again, and return the budget for `resident_length` bytes and more."""
        budget = self._bounded(resident_length + self._spare())
        if self._is_stalled():
            budget = min(budget, self._bounded(resident_length - resident_length // _SHRINK_SHARE))
        if budget < self.budget or budget >= self.budget + _LEAST_CHANGE or budget == self._most:
            self.budget = budget
        return self.budget

    def _bounded(self, length: int) -> int:
        return max(self._floor, min(self._most, length))

    def _is_stalled(self) -> bool:
        """Return whether the system waits for memory (psi of the kernel's documentation)."""
        try:
            some = self._pressure.read_text().split()
            return float(some[1].removeprefix("avg10=")) > _MOST_STALLED
        except (OSError, ValueError, IndexError):
            return False


def floor_of(shape: ModelShape, micro_batch: int) -> int:
    """Return the bytes of the largest layer's experts that one step may choose.

    A step is `micro_batch` tokens, each of which chooses `experts_used`, or all where that is not
    known. What a step chose is in memory at once.
    """
    return max(
        family.expert_length
        * min(family.expert_count, micro_batch * (family.experts_used or family.expert_count))
        for family in shape.routed.values()
    )


def check_memory(memory: int, floor: int, micro_batch: int) -> None:
    """Raise RequestError where a step's experts do not fit into `memory`."""
    if memory < floor:
        raise RequestError(
            "too little memory for the experts of one step",
            expected=f"{size_text(floor)}, for {micro_batch:,} tokens at once",
            found=size_text(memory),
            hint="give more --memory, or smaller micro-batches (llama.cpp's -ub) to the program",
        )
