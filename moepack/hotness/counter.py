"""How often experts were chosen, in all and in two halves, of which one is learned from.

What is learned from a sample has to be measured on another one: an order that fits the very tokens
it was made from always looks good. The halves are the requests of even and of odd number; where
there is but one request, the earlier and the later half of its tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.keys import ExpertKey
from moepack.trace.expert_places import ExpertPlaces
from moepack.trace.model import Counts, Ints, Item, Origin, Phase, Shorts, Unknown
from moepack.trace.steps import ALL_PHASES, Steps, StepStream

_MOST_STRETCHES = 64

Weighted = NDArray[np.float64]
"""Counts of selections that may have a weight, by place (`ExpertPlaces`)."""


class Half(NamedTuple):
    """One half: how many tokens, and `counts` of their selections, by place."""

    token_count: int
    counts: Ints


class Halves(NamedTuple):
    """What divides the tokens (`requests` or `time`), the half to learn from, and the other."""

    by: str
    learned: Half
    measured: Half


class _Stretch(NamedTuple):
    """Tokens that follow each other, and the counts of their selections."""

    token_count: int
    counts: Weighted


class SelectionCounter:
    """Counts the selections of traces as they come by.

    `phases` are those that count; those that are unknown always do. Selections may have a weight;
    tokens and requests are counted without it. Counts are by place: `places` says of which expert.
    """

    def __init__(self, phases: frozenset[Phase] = ALL_PHASES) -> None:
        self._phases = phases | {Phase.UNKNOWN}
        self._steps = StepStream(self._phases)
        self.places = ExpertPlaces()
        self.origins: list[Origin] = []
        self.loose_count = 0
        """Selections that came as counts, without their tokens."""
        self._loose = np.zeros(0)
        self._by_parity: list[Weighted] = [np.zeros(0), np.zeros(0)]
        self._token_counts = [0, 0]
        self._stretches: list[_Stretch] = []
        self._stretch_length = 1

    @property
    def token_count(self) -> int:
        """How many tokens there were, without those behind counts."""
        return self._steps.token_count

    @property
    def request_count(self) -> int:
        """How many requests these were of."""
        return self._steps.request_count

    @property
    def counts(self) -> Ints:
        """All selections."""
        return _whole(self._total())

    @property
    def highest(self) -> float:
        """The highest count there is; beyond 2**53 counts are not exact."""
        return float(self._total().max(initial=0))

    @property
    def selection_count(self) -> int:
        """How many selections there were."""
        return sum(self.counts.tolist())

    @property
    def unknown(self) -> frozenset[Unknown]:
        """What any of the traces does not tell."""
        return frozenset(word for origin in self.origins for word in origin.unknown)

    @property
    def stated_token_count(self) -> int | None:
        """How many tokens there were, with those that counts state; None if some do not."""
        stated = [origin.token_count for origin in self.origins if Unknown.TOKENS in origin.unknown]
        if any(count is None for count in stated):
            return None
        return self.token_count + sum(count or 0 for count in stated)

    def add(self, item: Item, weight: float = 1.0) -> None:
        """Count the next piece of a trace."""
        if isinstance(item, Origin):
            self.origins.append(item)
        if isinstance(item, Counts) and item.phase in self._phases:
            self.loose_count += int(item.counts.sum())
            more = self._counted(item.layer, item.expert, item.counts) * weight
            self._loose = _add(self._loose, more)
        steps = self._steps.take(item)
        if steps is not None:
            self._add_steps(steps, weight)

    def halves(self) -> Halves | None:
        """Return both halves; None where no tokens are known, or but one."""
        if self.loose_count or not self.token_count:
            return None
        if self.request_count > 1:
            pairs = zip(self._token_counts, self._by_parity, strict=True)
            return Halves("requests", *(self._half(count, counts) for count, counts in pairs))
        middle = (len(self._stretches) + 1) // 2
        earlier, later = self._stretches[:middle], self._stretches[middle:]
        if not later:
            return None
        return Halves("time", *(self._half(*_sum(part)) for part in (earlier, later)))

    def by_expert(self, counts: Ints) -> dict[ExpertKey, int]:
        """Return counts by expert, in the order of layers and experts, without zeros."""
        layers, experts = self.places.keys(np.flatnonzero(counts))
        order = np.lexsort((experts, layers))
        numbers = counts[counts != 0][order].tolist()
        keys = map(ExpertKey, layers[order].tolist(), experts[order].tolist())
        return dict(zip(keys, numbers, strict=True))

    def _total(self) -> Weighted:
        everywhere = np.zeros(self.places.count)
        return _add(_add(_add(*self._by_parity), self._loose), everywhere)

    def _half(self, token_count: int, counts: Weighted) -> Half:
        return Half(token_count, _whole(_add(counts, np.zeros(self.places.count))))

    def _add_steps(self, steps: Steps, weight: float) -> None:
        parity = steps.request % 2
        of_selection = steps.of_selections(parity)
        for number in (0, 1):
            mine = of_selection == number
            more = self._counted(steps.layer[mine], steps.expert[mine]) * weight
            self._by_parity[number] = _add(self._by_parity[number], more)
            self._token_counts[number] += int(np.count_nonzero(parity == number))
        if self.request_count <= 1:
            self._add_stretches(steps, weight)

    def _add_stretches(self, steps: Steps, weight: float) -> None:
        """Count stretches of tokens, all of one length, of which there are never too many.

        Where the middle of a request lies is known at its end, so its counts are kept in stretches
        until then; when there are too many, each two that follow each other become one.
        """
        first = 0
        while first < steps.token_count:
            if not self._stretches or self._stretches[-1].token_count == self._stretch_length:
                self._stretches.append(_Stretch(0, np.zeros(0)))
            last_stretch = self._stretches[-1]
            room = self._stretch_length - last_stretch.token_count
            last = min(steps.token_count, first + room)
            chosen = slice(int(steps.starts[first]), int(steps.starts[last]))
            more = self._counted(steps.layer[chosen], steps.expert[chosen]) * weight
            counts = _add(last_stretch.counts, more)
            self._stretches[-1] = _Stretch(last_stretch.token_count + last - first, counts)
            first = last
            if len(self._stretches) > _MOST_STRETCHES:
                starts = range(0, len(self._stretches), 2)
                self._stretches = [_sum(self._stretches[at : at + 2]) for at in starts]
                self._stretch_length *= 2

    def _counted(self, layer: Shorts, expert: Shorts, counts: Ints | None = None) -> Weighted:
        """Count selections, each once or as often as `counts` says."""
        return np.bincount(self.places.of(layer, expert), counts).astype(np.float64)


def _whole(counts: Weighted) -> Ints:
    return np.rint(counts).astype(np.int64)


def _add(counts: Weighted, more: Weighted) -> Weighted:
    """Add counts by place, of which either may have more places."""
    if len(counts) < len(more):
        counts, more = more, counts
    total = counts.copy()
    total[: len(more)] += more
    return total


def _sum(stretches: list[_Stretch]) -> _Stretch:
    total = np.zeros(0)
    for stretch in stretches:
        total = _add(total, stretch.counts)
    return _Stretch(sum(stretch.token_count for stretch in stretches), total)
