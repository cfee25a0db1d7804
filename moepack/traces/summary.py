"""The summary of a trace file after an import or a recording."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moepack.traces.model import Counts, Item, Origin, Phase, Unknown
from moepack.traces.steps import ALL_PHASES, StepStream


class TraceTotals(NamedTuple):
    """Totals of a trace; `counted_selection_count` are selections of unknown tokens."""

    token_count: int
    request_count: int
    selection_count: int
    counted_selection_count: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace file: its totals, the `unknown` facts, and the totals of the `added` items.

    `warnings` counts items left out, by problem.
    """

    path: str
    token_count: int
    request_count: int
    selection_count: int
    counted_selection_count: int
    unknown: tuple[Unknown, ...]
    origins: tuple[Origin, ...]
    added: TraceTotals
    warnings: Counter[str] = field(default_factory=Counter)


class TraceCounter:
    """Counts tokens, requests and selections, piece by piece."""

    def __init__(self) -> None:
        self._steps = StepStream(ALL_PHASES)
        self._selection_count = self._counted_selection_count = 0
        self._has_unknown_phases = False
        self.origins: list[Origin] = []

    def add(self, item: Item) -> None:
        """Count the next piece."""
        if isinstance(item, Origin):
            self.origins.append(item)
        elif isinstance(item, Counts):
            self._counted_selection_count += sum(item.counts.tolist())  # may pass 64 bits
        else:
            self._selection_count += len(item.layer)
            self._has_unknown_phases |= bool(np.any(item.phase == Phase.UNKNOWN))
        self._steps.add(item)

    @property
    def totals(self) -> TraceTotals:
        """The totals so far."""
        return TraceTotals(
            self._steps.token_count,
            self._steps.request_count,
            self._selection_count,
            self._counted_selection_count,
        )

    def summary(self, path: str, added: TraceTotals, warnings: Counter[str]) -> TraceSummary:
        """Return the summary of a file of all counted items."""
        words = {word for origin in self.origins for word in origin.unknown}
        if self._has_unknown_phases:
            words.add(Unknown.PHASES)
        return TraceSummary(
            path, *self.totals, tuple(sorted(words)), tuple(self.origins), added, warnings
        )
