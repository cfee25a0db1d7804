"""Steps of a trace: calls of the model, one after another.

A step is one call: all tokens of a prefill, or one token of a decode. Requests are numbered here
over all files of a trace, and phases are selected here, so that counters of selections, windows and
cache hits all see the same tokens; so are the totals of a trace.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moepack.traces.model import (
    Bytes,
    Counts,
    Ints,
    Item,
    Origin,
    Phase,
    Shorts,
    Tokens,
    Unknown,
    changes,
    selected,
)

Truths = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

ALL_PHASES = frozenset(Phase)
DECODE_PHASES = frozenset({Phase.DECODE, Phase.UNKNOWN})
"""Decode, and unknown phases, which may be decode."""


class Steps(NamedTuple):
    """Some tokens of a trace in their order, of the requested phases.

    `request` [tokens] numbers requests from 0 over the whole trace. `is_first` [tokens] is whether
    a token begins its request, `begins_step` [tokens] whether it begins a step. The selections of
    token t are `layer[starts[t]:starts[t + 1]]` and `expert[…]`, in the order of the model.
    """

    request: Ints
    is_first: Truths
    begins_step: Truths
    phase: Bytes
    starts: Ints
    layer: Shorts
    expert: Shorts

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return len(self.request)

    def of_selections(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return for each selection the value of its token."""
        return np.repeat(values, np.diff(self.starts))


class StepStream:
    """Turns the pieces of a trace, as they come, into steps, in constant memory.

    Only tokens of `phases` are taken, and only the first `most_tokens` of them.
    """

    def __init__(
        self, phases: frozenset[Phase] = DECODE_PHASES, most_tokens: int | None = None
    ) -> None:
        self._phases = phases
        self._most_tokens = most_tokens
        self._origin_count = 0
        self._last_request: tuple[int, int] | None = None
        self._last_phase = Phase.UNKNOWN
        self.token_count = 0
        self.request_count = 0

    @property
    def is_full(self) -> bool:
        """Whether no further token will be taken."""
        return self._most_tokens is not None and self.token_count >= self._most_tokens

    def add(self, item: Item) -> Steps | None:
        """Return the steps in the next piece; None if it has none."""
        if isinstance(item, Origin):
            self._origin_count += 1
        if not isinstance(item, Tokens) or self.is_full:
            return None
        tokens = self._of_phases(item)
        if not len(tokens.request):
            return None
        is_first = changes(tokens.request)  # numbers begin again in each file
        is_first[0] = (self._origin_count, int(tokens.request[0])) != self._last_request
        self._last_request = (self._origin_count, int(tokens.request[-1]))
        request = self.request_count - 1 + np.cumsum(is_first)
        self.request_count += int(np.count_nonzero(is_first))
        self.token_count += len(request)
        phase_before = np.concatenate(([self._last_phase], tokens.phase[:-1]))
        self._last_phase = Phase(int(tokens.phase[-1]))
        goes_on = (tokens.phase == Phase.PREFILL) & (phase_before == Phase.PREFILL) & ~is_first
        columns = (tokens.phase, tokens.starts, tokens.layer, tokens.expert)
        return Steps(request, is_first, ~goes_on, *columns)

    def _of_phases(self, tokens: Tokens) -> Tokens:
        kept: Truths = np.isin(tokens.phase, [int(phase) for phase in self._phases])
        if self._most_tokens is not None:
            kept &= np.cumsum(kept) <= self._most_tokens - self.token_count
        return tokens if kept.all() else selected(tokens, np.repeat(kept, np.diff(tokens.starts)))


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
