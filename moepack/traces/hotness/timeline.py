"""The counts of a trace along its time, to be cut near the middle when its end is known.

A trace may be longer than memory and come through a pipe, so its middle is known only at its end.
Until then its counts are in cells of equally many tokens; when there are too many cells, each two
neighbours become one. A cell is cut once more where the first request in it begins: it is best to
cut between two requests, since one request uses much the same experts from beginning to end.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moepack.traces.expert_places import sums_by_place
from moepack.traces.model import Ints
from moepack.traces.steps import Truths

MOST_CELLS, FEWEST_CELLS = 32, 8
"""There are at least half as many, so the middle is found to 1/32 of all tokens, or 1/8 with very
many places."""
_MOST_NUMBERS = 1 << 22
"""Of all cells together: enough for 32 cells of a model of 131,072 experts."""
LEAST_SHARE = 0.3
"""Of all tokens: rather than leave one side with less, a request is cut."""

Weighted = NDArray[np.int64 | np.float64]


class PlaceCounts:
    """Counts of selections by place (`ExpertPlaces`): exact whole numbers, if all weights are."""

    def __init__(self, place_count: int = 0) -> None:
        self.values: Weighted = np.zeros(place_count, np.int64)

    def count(self, places: Ints, weight: float, counts: Ints | None = None) -> None:
        """Count places, each once or `counts` times, with a weight."""
        numbers = np.bincount(places) if counts is None else sums_by_place(places, counts)
        is_whole = float(weight).is_integer()
        self.add(numbers * int(weight) if is_whole else numbers * np.float64(weight))

    def add(self, more: Weighted) -> None:
        """Add other counts."""
        if len(self.values) < len(more):
            self.values = np.pad(self.values, (0, len(more) - len(self.values)))
        if more.dtype != np.int64:
            self.values = self.values.astype(np.float64, copy=False)
        self.values[: len(more)] += more.astype(self.values.dtype, copy=False)

    def whole(self) -> Ints:
        """Return the counts, rounded to whole numbers."""
        is_whole = self.values.dtype == np.int64
        return (self.values if is_whole else np.rint(self.values)).astype(np.int64, copy=False)


@dataclass(slots=True)
class _Stretch:
    """Part of a cell: the tokens before it, whether it begins a request, and its counts."""

    start: int
    begins_request: bool
    counts: PlaceCounts = field(default_factory=PlaceCounts)


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

        `is_first` [tokens] is whether each begins a request; `places[starts[t]:starts[t + 1]]` are
        the selections of token t.
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
            selected = places[int(starts[first]) : int(starts[last])]
            counts = self._stretches[-1].counts
            counts.count(selected, weight)
            self.token_count += last - first
            first = last
            most = min(MOST_CELLS, max(FEWEST_CELLS, _MOST_NUMBERS // max(1, len(counts.values))))
            while self.token_count >= most * self._cell_length:
                self._join_cells()

    def _enter(self, begins_request: bool) -> None:
        """Begin a new stretch where the next token has to."""
        is_cell = self.token_count % self._cell_length == 0
        if is_cell or (begins_request and not self._cell_has_request):
            self._cell_has_request = begins_request
            self._stretches.append(_Stretch(self.token_count, begins_request))

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
                joined[-1].counts.add(stretch.counts.values)
        self._stretches = joined
        self._cell_has_request = has_request

    def total(self, start: int = 0, end: int | None = None) -> PlaceCounts:
        """Return the counts of all stretches that begin from `start` on, and before `end`."""
        total = PlaceCounts()
        for stretch in self._stretches:
            if start <= stretch.start and (end is None or stretch.start < end):
                total.add(stretch.counts.values)
        return total

    def halves(self) -> tuple[int, PlaceCounts, PlaceCounts] | None:
        """Return the token count of the earlier half, and both counts; None without two tokens.

        They are cut where a request begins, as near to the middle as possible, unless one of them
        would have less than LEAST_SHARE: then within a request.
        """
        if len(self._stretches) < 2:
            return None
        cut = self._cut()
        return cut, self.total(end=cut), self.total(cut)

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
