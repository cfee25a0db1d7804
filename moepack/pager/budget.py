"""How many bytes experts may take: what was given, or what is free, from second to second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moepack.errors import RequestError
from moepack.keys import ExpertKey
from moepack.machine.memory_limits import (
    MOST_STALLED,
    PRESSURE,
    spare_memory,
    stalled_percent,
)
from moepack.shape import ModelShape
from moepack.sizes import count_text, size_text

_SHRINK_SHARE = 8
"""An eighth of what is there goes when the system waits for memory."""
_LEAST_CHANGE = 64 << 20


Rooms = Mapping[ExpertKey, int]
"""The bytes that each expert takes in memory, in whole pages."""


class FreeMemory:
    """Follows what is free: grows where there is room, shrinks before the system suffers.

    `floor` is never gone below, `most` never beyond, in bytes.
    """

    def __init__(
        self,
        floor: int,
        most: int,
        spare: Callable[[], int] = spare_memory,
        pressure: Path = PRESSURE,
    ) -> None:
        self._floor, self._most = floor, most
        self._spare, self._pressure = spare, pressure
        self.budget = self._bounded(spare())

    def follow(self, resident_length: int) -> int:
        """Look at the system again, and return the budget for `resident_length` bytes and more."""
        budget = self._bounded(resident_length + self._spare())
        if (stalled_percent(self._pressure) or 0) > MOST_STALLED:
            budget = min(budget, self._bounded(resident_length - resident_length // _SHRINK_SHARE))
        if budget < self.budget or budget >= self.budget + _LEAST_CHANGE or budget == self._most:
            self.budget = budget
        return self.budget

    def _bounded(self, length: int) -> int:
        return max(self._floor, min(self._most, length))


def step_length(shape: ModelShape, rooms: Rooms, token_count: int) -> int:
    """Return the most bytes of experts that one step of so many tokens may choose, in any layer.

    A token chooses as many as the model says, or all where that is not known. What a step chose is
    in memory at once.
    """
    longest = _longest_rooms(rooms)
    return max(
        longest[layer]
        * min(family.expert_count, token_count * (family.experts_used or family.expert_count))
        for layer, family in shape.routed.items()
    )


def _longest_rooms(rooms: Rooms) -> dict[int, int]:
    """Return the bytes that the longest expert of each layer takes."""
    longest: dict[int, int] = {}
    for key, room in rooms.items():
        longest[key.layer] = max(room, longest.get(key.layer, 0))
    return longest


def token_length(shape: ModelShape, rooms: Rooms) -> int:
    """Return the most bytes of experts that one token may choose, in all layers together."""
    longest = _longest_rooms(rooms)
    return sum(
        longest[layer] * (family.experts_used or family.expert_count)
        for layer, family in shape.routed.items()
    )


def check_memory(memory: int, floor: int, micro_batch: int) -> None:
    """Raise RequestError where a step's experts do not fit into `memory`."""
    if memory < floor:
        raise RequestError(
            "too little memory for the experts of one step",
            expected=f"{size_text(floor)}, for {count_text(micro_batch, 'token')} at once",
            found=size_text(memory),
            hint="give more `memory`"
            + (
                ", or a smaller micro-batch (`-ub`): fewer tokens at once"
                if micro_batch > 1
                else ""
            ),
        )
