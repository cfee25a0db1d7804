"""The statistics of traces: the working set, and reuse.

The working set is the number of experts that a stretch of tokens needs, and of new ones. For
windows of 128 tokens within a request (a rest is left out): the smallest number of experts that
make up a share of all selections (with all of them it is U), and how many of these were not among
those of the window before (D). After the method of "MoE experts on SSD" (rentry, April 2026), whose
`analyze_experts.py` gives the same digits: experts with equal counts are in the order of their
first selection.

Reuse is the number of tokens until an expert is used again in its layer. Prefill is left out of
both.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moepack.common.shape import ModelShape
from moepack.traces.expert_places import ExpertPlaces, lengths_by_layer, padded, values_before
from moepack.traces.formats.reading import AnyTrace, TracedModel, opened
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.model import MAX_NUMBER, Ints, Item
from moepack.traces.steps import Steps, StepStream

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


def _ranked(places: Ints) -> tuple[Ints, Ints]:
    """Return the experts by falling count, and the counts; ties go by first selection."""
    counts = np.bincount(places)
    first = np.zeros(len(counts), np.int64)
    # Assigned from the last selection to the first, so that the first one stays.
    first[places[::-1]] = np.arange(len(places) - 1, -1, -1)
    used = np.flatnonzero(counts)
    order = used[np.lexsort((first[used], -counts[used]))]
    return order, counts[order]


MOST_TOKENS = 1 << 12
"""Limit of tokens, the first of a trace: enough for shares."""
_NEVER = -1
_POWERS = 64


@dataclass(frozen=True, slots=True)
class DistanceCount:
    """The number of selections that recur after `from_` to `to` tokens; None: the first ones."""

    from_: int | None
    to: int | None
    count: int


@dataclass(frozen=True, slots=True)
class LayerReuse:
    """The reuse in one layer; None if the trace is too short."""

    layer: int
    repeat_share: float | None
    median_distance: int | None


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """The reuse in all layers: shares are of selections, distances are tokens."""

    token_count: int
    repeat_share: float | None
    median_distance: int | None
    distances: tuple[DistanceCount, ...]
    layers: tuple[LayerReuse, ...]


class Reuse:
    """Measures tokens as they come; distances go on over requests, repetition does not."""

    def __init__(self) -> None:
        self.steps = StepStream(most_tokens=MOST_TOKENS)
        self._places = ExpertPlaces()
        self._last = np.zeros(0, np.int64)
        """By place, the token that used the expert last."""
        self._first_count = 0
        # By layer. Of most rows the system keeps nothing, since they stay zero.
        self._distances = np.zeros((MAX_NUMBER + 1, _POWERS), np.int64)
        self._repeated, self._repeatable = np.zeros((2, MAX_NUMBER + 1), np.int64)
        self._layers: set[int] = set()

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        first_token = self.steps.token_count
        steps = self.steps.add(item)
        if steps is not None and len(steps.layer):
            self._add_steps(steps, first_token)

    def facts(self) -> ReuseFacts:
        """Return the reuse so far."""
        layers = sorted(self._layers)
        return ReuseFacts(
            self.steps.token_count,
            self._repeat_share(layers),
            self._median_distance(layers),
            self._distance_counts(layers),
            tuple(
                LayerReuse(layer, self._repeat_share([layer]), self._median_distance([layer]))
                for layer in layers
                if self._distances[layer].any()
            ),
        )

    def _repeat_share(self, layers: Sequence[int]) -> float | None:
        """Return the share of selections of an expert that the token before used too."""
        repeatable = int(self._repeatable[layers].sum())
        return int(self._repeated[layers].sum()) / repeatable if repeatable else None

    def _distance_counts(self, layers: Sequence[int]) -> tuple[DistanceCount, ...]:
        """Count selections that come again after 1 token, 2, 3 to 4, 5 to 8 and so on."""
        by_power = self._distances[layers].sum(axis=0)
        last = int(np.max(np.flatnonzero(by_power), initial=-1))
        counts = [
            DistanceCount((1 << power - 1) + 1 if power else 1, 1 << power, int(by_power[power]))
            for power in range(last + 1)
        ]
        return (*counts, DistanceCount(None, None, self._first_count))

    def _median_distance(self, layers: Sequence[int]) -> int | None:
        """Return the tokens within which half of all reuses come, rounded up to a power of two."""
        by_power = self._distances[layers].sum(axis=0)
        total = int(by_power.sum())
        return 1 << int(np.searchsorted(np.cumsum(by_power), total / 2)) if total else None

    def _add_steps(self, steps: Steps, first_token: int) -> None:
        token = steps.of_selections(np.arange(steps.token_count) + first_token)
        goes_on = ~steps.of_selections(steps.is_first)
        layer = steps.layer
        self._layers.update(layer.tolist())
        places = self._places.index_of(steps.layer, steps.expert)
        self._last = padded(self._last, self._places.count, _NEVER)
        before = values_before(token, places, self._last)
        np.add.at(self._repeatable, layer[goes_on], 1)
        np.add.at(self._repeated, layer[goes_on & (before == token - 1)], 1)
        self._first_count += int(np.count_nonzero(before == _NEVER))
        again = (before != _NEVER) & (before < token)
        # The exponent of a distance less 1 is the power of two that it is rounded up to.
        power = np.frexp((token[again] - before[again] - 1).astype(np.float64))[1]
        np.add.at(self._distances, (layer[again], power), 1)


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """The statistics of a trace; `warnings` counts items left out of the files, by problem."""

    window: int
    window_count: int
    request_count: int
    has_lengths: bool
    working_set: tuple[WorkingSetRow, ...]
    reuse: ReuseFacts
    warnings: Counter[str]


def trace_statistics(
    paths: AnyTrace,
    *,
    model: TracedModel | None = None,
    window: int = WINDOW,
    options: ReadOptions = ReadOptions(),
) -> TraceStatistics:
    """Measure the working set and the reuse of traces, in one pass over them.

    `paths` are files, or what `read_trace` returned. `window` is in tokens. The working set also
    has bytes with a `model` (a source, a pack, open or not, or a shape). Raises TraceError for
    faults in a file.
    """
    trace = opened(paths, options, model)
    working_set, reuse = WorkingSetCounter(window, trace.shape), Reuse()
    warnings = trace.feed(working_set.add, reuse.add)
    return TraceStatistics(
        working_set.window,
        working_set.window_count,
        working_set.steps.request_count,
        trace.shape is not None,
        working_set.rows(),
        reuse.facts(),
        warnings,
    )
