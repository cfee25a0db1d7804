"""Counting selections, in all and in two halves, one to learn from and one to measure on.

A ranking has to be measured on another sample: on the very tokens that it was made from it always
looks good. The halves are the earlier and the later half of a trace, since today's ranking is used
tomorrow.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.traces.expert_places import ExpertPlaces, PlaceCounts
from moepack.traces.model import (
    MAX_COUNT,
    Counts,
    Ints,
    Item,
    Origin,
    Phase,
    Unknown,
)
from moepack.traces.steps import ALL_PHASES, StepStream, Truths

MOST_STRETCHES, FEWEST_STRETCHES = 64, 16
"""So the middle is found to 1/32 of all tokens, or 1/8 with very many places."""
_MOST_NUMBERS = 1 << 22
"""Of all stretches together: enough for those of a model of 65,536 experts."""
LEAST_SHARE = 0.3
"""Of all tokens: rather than leave one side with less, a request is cut."""


@dataclass(slots=True)
class _Stretch:
    """Consecutive tokens: those before them, whether they begin a request, and their counts."""

    start: int
    begins_request: bool
    token_count: int = 0
    counts: PlaceCounts = field(default_factory=PlaceCounts)


class Half(NamedTuple):
    """One half: its tokens, and the `counts` of their selections by place."""

    token_count: int
    counts: Ints


class Halves(NamedTuple):
    """The half to learn from, and the other one."""

    learned: Half
    measured: Half


class Timeline:
    """Counts selections by place along a trace's time, to be cut near the middle at its end.

    A trace may be longer than memory and come through a pipe, so its middle is known only at its
    end. Until then its counts are in stretches: when there are too many, the shortest neighbours
    are joined, rather within a request than over its border. It is best to cut between two
    requests, since one uses much the same experts from beginning to end.
    """

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self.token_count = 0

    def add(self, is_first: Truths, starts: Ints, places: Ints) -> None:
        """Count the next tokens.

        `is_first` [tokens] is whether each begins a request; `places[starts[t]:starts[t + 1]]` are
        the selections of token t.
        """
        count = len(is_first)
        begins = np.append(np.flatnonzero(is_first), count)
        first = 0
        while first < count:
            most = max(1, self.token_count // MOST_STRETCHES)
            last = self._stretches[-1] if self._stretches else None
            if last is None or is_first[first] or last.token_count >= most:
                self._make_room()
                last = _Stretch(self.token_count, bool(is_first[first]))
                self._stretches.append(last)
            end = min(
                first + most - last.token_count,
                int(begins[np.searchsorted(begins, first, "right")]),
            )
            last.counts.count(places[int(starts[first]) : int(starts[end])])
            last.token_count += end - first
            self.token_count += end - first
            first = end

    def _make_room(self) -> None:
        """Join whole stretches until there is room for another, however the tokens come."""
        place_count = max((len(one.counts.values) for one in self._stretches), default=0)
        most = min(MOST_STRETCHES, max(FEWEST_STRETCHES, _MOST_NUMBERS // max(1, place_count)))
        while len(self._stretches) >= most:
            pairs = zip(self._stretches, self._stretches[1:], strict=False)
            costs = [
                (one.token_count + other.token_count) * (2 if other.begins_request else 1)
                for one, other in pairs
            ]
            shortest = costs.index(min(costs))
            joined = self._stretches.pop(shortest + 1)
            self._stretches[shortest].counts.add(joined.counts.values)
            self._stretches[shortest].token_count += joined.token_count

    def total(self, start: int = 0, end: int | None = None) -> PlaceCounts:
        """Return the counts of all stretches that begin from `start` on, and before `end`."""
        total = PlaceCounts()
        for stretch in self._stretches:
            if start <= stretch.start and (end is None or stretch.start < end):
                total.add(stretch.counts.values)
        return total

    def halves(self) -> Halves | None:
        """Return the earlier half and the later one; None without two tokens.

        They are cut where a request begins, as near to the middle as possible, unless one of them
        would have less than LEAST_SHARE: then within a request.
        """
        if len(self._stretches) < 2:
            return None
        cut = self._cut()
        earlier, later = self.total(end=cut).values, self.total(cut).values
        return Halves(Half(cut, earlier), Half(self.token_count - cut, later))

    def _cut(self) -> int:
        """Return how many tokens the earlier half has; of two cuts as good, the later one."""

        def distance(start: int) -> tuple[int, int]:
            return abs(2 * start - self.token_count), -start

        starts = [stretch.start for stretch in self._stretches[1:]]
        between = [s.start for s in self._stretches[1:] if s.begins_request]
        best = min(between, key=distance, default=0)
        if min(best, self.token_count - best) >= LEAST_SHARE * self.token_count:
            return best
        return min(starts, key=distance)


def hottest_first(counts: Ints) -> Ints:
    """Return the indices of counts in falling order; equal counts stay in their order."""
    return np.argsort(-counts, kind="stable")


def hottest_within(counts: Ints, lengths: Ints, budget: int) -> NDArray[np.bool_]:
    """Return whether each expert is among the hottest that fit into the budget together."""
    order = hottest_first(counts)
    is_hot = np.zeros(len(counts), np.bool_)
    is_hot[order[np.cumsum(lengths[order]) <= budget]] = True
    return is_hot


def covered_count(learned: Ints, measured: Ints, lengths: Ints, budget: int) -> int:
    """Return the measured selections of the experts that are hottest by the learned counts."""
    return int(measured[hottest_within(learned, lengths, budget)].sum())


class SelectionCounter:
    """Counts the selections of traces as they come.

    `phases` are counted; unknown ones always are. `steps` counts tokens and requests. Counts are by
    place in `places`.
    """

    def __init__(self, phases: frozenset[Phase] = ALL_PHASES) -> None:
        self._phases = phases | {Phase.UNKNOWN}
        self.steps = StepStream(self._phases)
        self.places = ExpertPlaces()
        self.origins: list[Origin] = []
        self.loose_count = 0
        """Selections in counts, without their tokens."""
        self._total_count = 0
        self._loose = PlaceCounts()
        self._timeline = Timeline()

    @property
    def counts(self) -> Ints:
        """All selections."""
        total = self._timeline.total()
        total.add(self._loose.values)
        return total.values

    @property
    def selection_count(self) -> int:
        """The number of selections."""
        return sum(self.counts.tolist())

    @property
    def stated_token_count(self) -> int | None:
        """The number of tokens, with those behind counts; None if any of these are unknown."""
        numbers = [one.token_count for one in self.origins if Unknown.TOKENS in one.unknown]
        if None in numbers:
            return None
        return self.steps.token_count + sum(number or 0 for number in numbers)

    def add(self, item: Item) -> None:
        """Count the next piece of a trace.

        Raises TraceError if all counts together are more than a pack can state.
        """
        if isinstance(item, Origin):
            self.origins.append(item)
        if isinstance(item, Counts) and item.phase in self._phases:
            count = sum(item.counts.tolist())  # may pass 64 bits
            self.loose_count += count
            self._add_total(count)
            places = self.places.index_of(item.layer, item.expert)
            self._loose.count(places, item.counts)
        steps = self.steps.add(item)
        if steps is not None:
            self._add_total(len(steps.layer))
            places = self.places.index_of(steps.layer, steps.expert)
            self._timeline.add(steps.is_first, steps.starts, places)

    def halves(self) -> Halves | None:
        """Return the earlier and the later half, near equal, cut between requests if possible.

        None without two tokens.
        """
        return None if self.loose_count else self._timeline.halves()

    def _add_total(self, count: int) -> None:
        """Add to the sum of all counts, and check it, so that no count can overflow."""
        self._total_count += count
        if self._total_count > MAX_COUNT:
            problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
            raise TraceError(problem, expected=expected, found=f"{self._total_count:,}")


def by_expert(places: ExpertPlaces, counts: Ints) -> dict[ExpertKey, int]:
    """Return counts by expert, in the order of layers and experts, without zeros."""
    layers, experts, numbers = (column.tolist() for column in places.counted(counts))
    return dict(zip(map(ExpertKey, layers, experts), numbers, strict=True))
