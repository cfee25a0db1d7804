"""The working set: how many experts a stretch of tokens needs, and how many of them are new.

For windows of 128 tokens within a request (a rest is left out): the smallest number of experts that
make up a share of all selections (with all of them it is U), and how many of these were not among
those of the window before (D). After the method of "MoE experts on SSD" (rentry, April 2026), whose
`analyze_experts.py` gives the same digits: experts chosen equally often count in the order of
their first selection.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from moepack.trace.model import Counts, Ints, Item, Origin, Phase, Shorts, Tokens

SHARES = (0.10, 0.25, 0.50, 0.80, 0.95, 0.99, 0.999, 1.0)
WINDOW = 128


class Row(NamedTuple):
    """One share of the selections: the experts that make it up, and the new ones, on average.

    Lengths are bytes, None where the blobs' lengths are not known.
    """

    share: float
    expert_count: float
    new_count: float
    length: float | None
    new_length: float | None


class WorkingSet:
    """Counts windows as tokens come by. Prefill is left out: it goes through batches.

    `lengths` [layers, experts] are the bytes of each expert.
    """

    def __init__(self, window: int = WINDOW, lengths: Ints | None = None) -> None:
        self.window = window
        self.window_count = 0
        self.request_count = 0
        self._pair_count = 0
        self._lengths = lengths
        self._sums = np.zeros((4, len(SHARES)))
        self._request: tuple[int, int] = (-1, -1)
        self._origin = 0
        self._layers: list[Shorts] = []
        self._experts: list[Shorts] = []
        self._token_count = 0
        self._before: tuple[Ints, Ints] | None = None
        self._width = 1

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, Origin):
            self._origin += 1
        elif not isinstance(item, Counts):
            self._add_tokens(item)

    def _add_tokens(self, tokens: Tokens) -> None:
        wanted = tokens.phase != Phase.PREFILL
        borders = np.flatnonzero(
            (tokens.request[1:] != tokens.request[:-1]) | (wanted[1:] != wanted[:-1])
        )
        edges = [0, *(borders + 1).tolist(), len(wanted)]
        for first, last in itertools.pairwise(edges):
            if first < last and wanted[first]:
                self._begin((self._origin, int(tokens.request[first])))
                self._add_run(tokens, first, last)

    def _begin(self, request: tuple[int, int]) -> None:
        if request != self._request:
            self._request = request
            self.request_count += 1
            self._layers, self._experts, self._token_count = [], [], 0
            self._before = None

    def _add_run(self, tokens: Tokens, first: int, last: int) -> None:
        """Add the tokens `first` to `last`, all of one request."""
        while first < last:
            count = min(self.window - self._token_count, last - first)
            chosen = slice(int(tokens.starts[first]), int(tokens.starts[first + count]))
            self._layers.append(tokens.layer[chosen])
            self._experts.append(tokens.expert[chosen])
            self._token_count += count
            first += count
            if self._token_count == self.window:
                self._close_window(np.concatenate(self._layers), np.concatenate(self._experts))
                self._layers, self._experts, self._token_count = [], [], 0

    def _close_window(self, layer: Shorts, expert: Shorts) -> None:
        self._widen(int(expert.max()) + 1)
        ranked, counts = _rank(layer * np.int64(self._width) + expert)
        reached = np.cumsum(counts)
        sizes = np.searchsorted(reached, reached[-1] * np.array(SHARES)) + 1
        self.window_count += 1
        self._sums[0] += sizes
        lengths = self._lengths_of(ranked)
        if lengths is not None:
            self._sums[2] += np.cumsum(lengths)[sizes - 1]
        if self._before is not None:
            self._add_new(ranked, sizes, lengths, *self._before)
        self._before = ranked, sizes

    def _widen(self, width: int) -> None:
        """Make keys `layer * width + expert`, where there are more experts than before."""
        if width <= self._width:
            return
        if self._before is not None:
            ranked, sizes = self._before
            self._before = ranked // self._width * width + ranked % self._width, sizes
        self._width = width

    def _add_new(
        self, ranked: Ints, sizes: Ints, lengths: Ints | None, before: Ints, before_sizes: Ints
    ) -> None:
        self._pair_count += 1
        rank_before = np.full(int(max(ranked.max(), before.max())) + 1, len(before), np.int32)
        rank_before[before] = np.arange(len(before), dtype=np.int32)
        rank = rank_before[ranked]
        for number, (size, before_size) in enumerate(zip(sizes, before_sizes, strict=True)):
            is_new = rank[:size] >= before_size
            self._sums[1, number] += np.count_nonzero(is_new)
            if lengths is not None:
                self._sums[3, number] += lengths[:size][is_new].sum()

    def _lengths_of(self, keys: Ints) -> Ints | None:
        return (
            None
            if self._lengths is None
            else self._lengths[keys // self._width, keys % self._width]
        )

    def rows(self) -> list[Row]:
        """Give the averages over all windows; zeros where there is none."""
        per_window, per_pair = max(self.window_count, 1), max(self._pair_count, 1)
        averages = self._sums / np.array([[per_window], [per_pair], [per_window], [per_pair]])
        return [
            Row(
                share,
                *(float(value) for value in averages[:2, n]),
                *((None, None) if self._lengths is None else map(float, averages[2:, n])),
            )
            for n, share in enumerate(SHARES)
        ]


def of(items: Iterable[Item], window: int = WINDOW, lengths: Ints | None = None) -> WorkingSet:
    """Take a whole trace."""
    found = WorkingSet(window, lengths)
    for item in items:
        found.add(item)
    return found


def _rank(keys: Ints) -> tuple[Ints, Ints]:
    """Give the keys of experts by falling count, and the counts; ties go by first selection."""
    counts = np.bincount(keys)
    first = np.empty(len(counts), np.int64)
    first[keys[::-1]] = np.arange(len(keys) - 1, -1, -1)  # of several, the last one stays
    there = np.flatnonzero(counts)
    order = np.sort((counts[there] << 32) - first[there])[::-1]
    place = -order & 0xFFFFFFFF
    return keys[place], (order + place) >> 32
