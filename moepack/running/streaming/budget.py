"""The memory of a model that runs, by part; of experts a limit, or the memory that is free."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey, ModelShape
from moepack.common.sizes import count_text, size_text
from moepack.host.memory_limits import MOST_STALLED, PRESSURE, spare_memory, stalled_percent

_SHRINK_SHARE = 8
"""An eighth of the experts in memory goes when the system waits for memory."""
_LEAST_CHANGE = 64 << 20

SlotLengths = Mapping[ExpertKey, int]
"""The bytes that each expert takes in memory, in whole pages."""


class MemoryParts(NamedTuple):
    """The bytes that a model takes while it runs, at most; None is unknown.

    `dense` weights lie in the page cache. `context` is keys, values and states of `token_count`
    tokens, `computing` the buffers for a micro-batch, `texts` what is kept of earlier texts,
    `program` all else: Python, libraries, the vocabulary, and tables of the kernel. A model that
    drafts is part of the first three.
    """

    experts: int | None = None
    dense: int | None = None
    context: int | None = None
    computing: int | None = None
    texts: int | None = None
    program: int | None = None
    token_count: int | None = None

    @property
    def total(self) -> int | None:
        """The sum; None if a part is unknown."""
        parts = self[: MemoryParts._fields.index("token_count")]
        return None if None in parts else sum(part or 0 for part in parts)

    @property
    def own_length(self) -> int:
        """The bytes beside experts that are no page cache, as far as they are known."""
        return sum(part or 0 for part in (self.context, self.computing, self.texts, self.program))

    @property
    def beside(self) -> int:
        """The bytes beside experts, as far as they are known."""
        return (self.dense or 0) + self.own_length


class FreeMemory:
    """Follows the free memory: grows with it, shrinks before the system suffers.

    The budget is at least `floor` and at most `most` bytes; `beside` are left to others.
    """

    def __init__(
        self,
        floor: int,
        most: int,
        spare: Callable[[], int] = spare_memory,
        pressure: Path = PRESSURE,
        *,
        beside: int = 0,
    ) -> None:
        self._floor, self._most = floor, most
        self._spare, self._pressure = spare, pressure
        self.budget = self._bounded(spare() - beside)

    def follow(self, resident_length: int, beside: int = 0) -> int:
        """Look at the system again, and return the budget for `resident_length` bytes and more."""
        budget = self._bounded(resident_length + self._spare() - beside)
        if (stalled_percent(self._pressure) or 0) > MOST_STALLED:
            budget = min(budget, self._bounded(resident_length - resident_length // _SHRINK_SHARE))
        if budget < self.budget or budget >= self.budget + _LEAST_CHANGE or budget == self._most:
            self.budget = budget
        return self.budget

    def _bounded(self, length: int) -> int:
        return max(self._floor, min(self._most, length))


def step_length(shape: ModelShape, lengths: SlotLengths, token_count: int) -> int:
    """Return the most bytes of experts that one step of `token_count` tokens may use in any layer.

    The experts of a step are in memory at once. A token uses as many as the model says, or all if
    that is unknown.
    """
    longest: dict[int, int] = {}
    for key, length in lengths.items():
        longest[key.layer] = max(length, longest.get(key.layer, 0))
    return max(
        longest[layer]
        * min(family.expert_count, token_count * (family.experts_used or family.expert_count))
        for layer, family in shape.routed.items()
    )


def check_memory(memory: int, floor: int, micro_batch: int) -> None:
    """Raise RequestError if a step's experts do not fit into `memory` bytes."""
    if memory < floor:
        smaller = ", or a smaller micro-batch (`-ub`): fewer tokens at once"
        raise RequestError(
            "too little memory for the experts of one step",
            expected=f"{size_text(floor)}, for {count_text(micro_batch, 'token')} at once",
            found=size_text(memory),
            hint="give more `memory`" + (smaller if micro_batch > 1 else ""),
        )
