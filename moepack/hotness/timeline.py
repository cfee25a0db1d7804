"""The counts of a trace along its time, to be cut near the middle when its end is known.

A trace may be longer than memory and come through a pipe, so where its middle lies is known only at
its end. Until then its counts are kept in cells of equally many tokens; when there are too many
cells, each two that follow each other become one. A cell is cut once more where the first request
in it begins: between two requests is the best place to cut, since what one request chooses is much
alike from its beginning to its end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.trace.expert_places import sums_by_place
from moepack.trace.model import Ints
from moepack.trace.steps import Truths

MOST_CELLS, FEWEST_CELLS = 32, 8
"""Of these there are half as many at least, so the middle is met to 1/32 of all tokens, or 1/8
where there are very many places."""
_MOST_NUMBERS = 1 << 22
"""Of all cells together: enough for 32 cells of a model of 131,072 experts."""
LEAST_SHARE = 0.3
"""Of all tokens: rather than leave one side with less, a request is cut."""

Weighted = NDArray[np.int64 | np.float64]
"""Counts of selections by place (`ExpertPlaces`); whole numbers where all weights are."""


class Span(NamedTuple):
    """Tokens that follow each other: how many, and the counts of their selections."""

    token_count: int
    counts: Weighted


@dataclass(slots=True)
class _Stretch:
    """Part of a cell: the tokens before it, whether it begins a request, and its counts."""

    start: int
    begins_request: bool
    counts: Weighted


class Timeline:
    """Counts selections by place, in constant memory."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._cell_length = 1
        self._cell_has_request = False
        """Whether a request begins in the last cell."""
        self.token_count = 0

    def add(self, is_first: Truths, starts: Ints, places: Ints, weight: float) -> None:
        """Count the next tokens.

        `is_first` [tokens] says which of them begin a request; `places[starts[t]:starts[t + 1]]`
        is what token t chose.
        """
        count = len(is_first)
        begins = np.append(np.flatnonzero(is_first), count)
        first = 0
        while first < count:
            self._enter(bool(is_first[first]))
            room = self._cell_length - self.token_count % self._cell_length
            last = min(count, first + room)
            if not self._cell_has_request:
                last = min(last, int(begins[np.searchsorted(begins, first, "right")]))
            chosen = places[int(starts[first]) : int(starts[last])]
            stretch = self._stretches[-1]
            stretch.counts = add_counts(stretch.counts, count_places(chosen, weight))
            self.token_count += last - first
            first = last
            most = min(MOST_CELLS, max(FEWEST_CELLS, _MOST_NUMBERS // max(1, len(stretch.counts))))
            while self.token_count >= most * self._cell_length:
                self._join_cells()

    def _enter(self, begins_request: bool) -> None:
        """Begin a new stretch where the next token has to."""
        is_cell = self.token_count % self._cell_length == 0
        if is_cell or (begins_request and not self._cell_has_request):
            self._cell_has_request = begins_request
            self._stretches.append(_Stretch(self.token_count, begins_request, no_counts()))

    def _join_cells(self) -> None:
        """Make one cell of each two, and keep only the first request that begins in it."""
        self._cell_length *= 2
        joined: list[_Stretch] = []
        has_request = False
        for stretch in self._stretches:
            is_cell = stretch.start % self._cell_length == 0
            if is_cell or (stretch.begins_request and not has_request):
                has_request = stretch.begins_request
                joined.append(stretch)
            else:
                joined[-1].counts = add_counts(joined[-1].counts, stretch.counts)
        self._stretches = joined
        self._cell_has_request = has_request

    def total(self) -> Weighted:
        """Return all counts."""
        return _sum(self._stretches)

    def halves(self) -> tuple[Span, Span] | None:
        """Return the earlier and the later half; None where there is but one token, or none.

        They are cut where a request begins, at the place that is nearest to the middle, unless one
        of them would have less than LEAST_SHARE: then within a request.
        """
        if len(self._stretches) < 2:
            return None
        cut = self._cut()
        earlier = [stretch for stretch in self._stretches if stretch.start < cut]
        later = self._stretches[len(earlier) :]
        return Span(cut, _sum(earlier)), Span(self.token_count - cut, _sum(later))

    def _cut(self) -> int:
        """Return how many tokens the earlier half has; of two places as good, the later one."""

        def distance(start: int) -> tuple[int, int]:
            return abs(2 * start - self.token_count), -start

        starts = [stretch.start for stretch in self._stretches[1:]]
        between = [s.start for s in self._stretches[1:] if s.begins_request]
        best = min(between, key=distance, default=0)
        if min(best, self.token_count - best) >= LEAST_SHARE * self.token_count:
            return best
        return min(starts, key=distance)


def no_counts(place_count: int = 0) -> Weighted:
    """Return the counts of places that nobody chose."""
    return np.zeros(place_count, np.int64)


def count_places(places: Ints, weight: float, counts: Ints | None = None) -> Weighted:
    """Count places, each once or as often as `counts` says; exactly, where the weight is whole."""
    numbers = np.bincount(places) if counts is None else sums_by_place(places, counts)
    is_whole = float(weight).is_integer()
    weighted: Weighted = numbers * int(weight) if is_whole else numbers * np.float64(weight)
    return weighted


def add_counts(counts: Weighted, more: Weighted) -> Weighted:
    """Return `counts` with `more` added by place, which may change `counts` itself."""
    if len(counts) < len(more):
        counts = np.pad(counts, (0, len(more) - len(counts)))
    if more.dtype != np.int64:
        counts = counts.astype(np.float64, copy=False)
    counts[: len(more)] = counts[: len(more)] + more
    return counts


def whole(counts: Weighted) -> Ints:
    """Round counts to whole numbers."""
    is_whole = counts.dtype == np.int64
    return (counts if is_whole else np.rint(counts)).astype(np.int64, copy=False)


def _sum(stretches: list[_Stretch]) -> Weighted:
    total = no_counts()
    for stretch in stretches:
        total = add_counts(total, stretch.counts)
    return total
