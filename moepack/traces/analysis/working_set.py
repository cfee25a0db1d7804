"""The working set: the number of experts that a stretch of tokens needs, and of new ones.

For windows of 128 tokens within a request (a rest is left out): the smallest number of experts that
make up a share of all selections (with all of them it is U), and how many of these were not among
those of the window before (D). After the method of "MoE experts on SSD" (rentry, April 2026), whose
`analyze_experts.py` gives the same digits: experts with equal counts are in the order of their
first selection.
"""

from typing import NamedTuple

import numpy as np

from moepack.common.shape import ModelShape
from moepack.traces.expert_places import ExpertPlaces, lengths_by_layer
from moepack.traces.model import Ints, Item
from moepack.traces.steps import StepStream

SHARES = (0.10, 0.25, 0.50, 0.80, 0.95, 0.99, 0.999, 1.0)
WINDOW = 128


class WorkingSetRow(NamedTuple):
    """One share of the selections: the experts that make it up, and the new ones, on average.

    Lengths are bytes, None if the model is unknown. All are None without a window, and the new ones
    if no window follows another in its request.
    """

    share: float
    expert_count: float | None
    new_count: float | None
    length: float | None
    new_length: float | None


class WorkingSetCounter:
    """Counts windows as tokens come. Prefill is left out: it is computed in batches.

    `shape` is the model's, for lengths in bytes.
    """

    def __init__(self, window: int = WINDOW, shape: ModelShape | None = None) -> None:
        self.window = window
        self.window_count = 0
        self.steps = StepStream()
        self._places = ExpertPlaces()
        self._lengths = None if shape is None else lengths_by_layer(shape.routed)
        self.pair_count = 0
        """The number of windows that follow another in their request."""
        self._totals = np.zeros((4, len(SHARES)))
        """Over all windows, in the order of a `WorkingSetRow`."""
        self._parts: list[Ints] = []
        """The places of the window's selections."""
        self._token_count = 0
        self._before: tuple[Ints, Ints] | None = None
        """The places of the window before, hottest first, and how many make up each share."""

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        steps = self.steps.add(item)
        if steps is None:
            return
        places = self._places.index_of(steps.layer, steps.expert)
        first = 0
        for border in [*np.flatnonzero(steps.is_first).tolist(), steps.token_count]:
            self._add_tokens(places, steps.starts, first, border)
            if border < steps.token_count:
                self._parts, self._token_count = [], 0
                self._before = None
            first = border

    def _add_tokens(self, places: Ints, starts: Ints, first: int, last: int) -> None:
        """Add the tokens `first` to `last`, all of one request."""
        while first < last:
            count = min(self.window - self._token_count, last - first)
            self._parts.append(places[int(starts[first]) : int(starts[first + count])])
            self._token_count += count
            first += count
            if self._token_count == self.window:
                self._close_window(np.concatenate(self._parts))
                self._parts, self._token_count = [], 0

    def _close_window(self, selections: Ints) -> None:
        places, counts = _ranked(selections)
        reached = np.cumsum(counts)
        sizes = np.searchsorted(reached, reached[-1] * np.array(SHARES)) + 1
        self.window_count += 1
        lengths = np.zeros(len(places), np.int64)
        if self._lengths is not None:
            lengths = self._lengths[self._places.keys(places)[0]]
        self._totals[[0, 2]] += sizes, np.cumsum(lengths)[sizes - 1]
        if self._before is not None:
            self._add_new(places, sizes, lengths, *self._before)
        self._before = places, sizes

    def _add_new(
        self, places: Ints, sizes: Ints, lengths: Ints, places_before: Ints, sizes_before: Ints
    ) -> None:
        """Count, for each share, the experts that were not among those of the window before."""
        self.pair_count += 1
        rank_before = np.full(self._places.count, len(places_before), np.int64)
        rank_before[places_before] = np.arange(len(places_before))
        rank = rank_before[places]
        for number, (size, size_before) in enumerate(zip(sizes, sizes_before, strict=True)):
            is_new = rank[:size] >= size_before
            self._totals[1, number] += np.count_nonzero(is_new)
            self._totals[3, number] += lengths[:size][is_new].sum()

    def rows(self) -> tuple[WorkingSetRow, ...]:
        """Return the averages over all windows."""
        counts = [self.window_count, self.pair_count]
        counts += [0, 0] if self._lengths is None else counts
        averages = (
            [float(total / count) if count else None for total in totals]
            for totals, count in zip(self._totals, counts, strict=True)
        )
        return tuple(WorkingSetRow(*values) for values in zip(SHARES, *averages, strict=True))


class FittingWindow:
    """Finds the longest window that fits: `WINDOW` tokens, or half as many until one does.

    It fits if a request has two of them, so that the second has new experts; if no request has two
    tokens, one will do.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        windows = [WINDOW >> shift for shift in range(WINDOW.bit_length())]
        self._sets = [WorkingSetCounter(window, shape) for window in windows]

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        for number, one in enumerate(self._sets):
            one.add(item)
            if one.pair_count:
                del self._sets[number + 1 :]  # no shorter one will be needed
                return

    @property
    def longest(self) -> WorkingSetCounter:
        """The working set of the longest window that fits so far."""
        fits = (one for one in self._sets if one.pair_count)
        has_one = (one for one in self._sets if one.window_count)
        return next(fits, None) or next(has_one, None) or self._sets[0]


def _ranked(places: Ints) -> tuple[Ints, Ints]:
    """Return the experts by falling count, and the counts; ties go by first selection."""
    counts = np.bincount(places)
    first = np.zeros(len(counts), np.int64)
    # Assigned from the last selection to the first, so that the first one stays.
    first[places[::-1]] = np.arange(len(places) - 1, -1, -1)
    used = np.flatnonzero(counts)
    order = used[np.lexsort((first[used], -counts[used]))]
    return order, counts[order]
