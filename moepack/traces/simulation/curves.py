"""Miss-ratio curves of LRU from one pass: of one cache, of one a layer, with a uniform router."""

from collections.abc import Mapping

import numpy as np

from moepack.common.shape import FamilyShape
from moepack.traces.caching.cache import Tally
from moepack.traces.expert_places import lengths_by_layer
from moepack.traces.model import Ints, Item, Phase, Tokens, repeated, selected
from moepack.traces.simulation.lookups import Lookups, LookupStream
from moepack.traces.simulation.stack import COLD, LruStack


class MissRatioCurve:
    """Counts lookups by stack distance: the hits, and the bytes that miss, at every budget.

    Memory grows with the number of different distances: if all experts have one length these are no
    more than there are experts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.cold_count = 0
        self.length = 0
        """The bytes of all lookups."""
        self._distances = np.zeros(0, np.int64)
        self._sums = np.zeros((2, 0), np.int64)
        """By distance, the number of lookups, and their bytes."""

    def add(self, distances: Ints, lengths: Ints) -> None:
        """Add lookups: their stack distances, COLD for first uses, and their bytes."""
        self.count += len(distances)
        self.length += int(lengths.sum())
        is_warm = distances != COLD
        warm = distances[is_warm]
        self.cold_count += len(distances) - len(warm)
        more = np.stack((np.ones_like(warm), lengths[is_warm]))
        every = np.concatenate((self._distances, warm))
        self._distances, index = np.unique(every, return_inverse=True)
        sums = np.zeros((2, len(self._distances)), np.int64)
        for row, values in zip(sums, np.concatenate((self._sums, more), axis=1), strict=True):
            np.add.at(row, index, values)
        self._sums = sums

    def tally(self, budget: int) -> Tally:
        """Return the counts of a cache with a budget."""
        index = np.searchsorted(self._distances, budget, side="right")
        hit_count, hit_length = self._sums[:, :index].sum(axis=1).tolist()
        return Tally(hit_count, self.count - hit_count, self.length - hit_length)

    def least_budget(self, share: float) -> int | None:
        """Return the least budget that gives so large a share of all possible hits."""
        if not len(self._distances):
            return None
        counts = self._sums[0]
        return int(self._distances[np.searchsorted(np.cumsum(counts), counts.sum() * share)])


class PhaseCurves:
    """The miss-ratio curves of decode and of prefill."""

    def __init__(self) -> None:
        self.decode, self.prefill = MissRatioCurve(), MissRatioCurve()

    def add(self, lookups: Lookups, distances: Ints, lengths: Ints) -> None:
        """Add lookups with their stack distances, and the bytes of their experts."""
        for curve, rows in ((self.decode, lookups.is_decode), (self.prefill, ~lookups.is_decode)):
            curve.add(distances[rows], lengths[rows])


class LayerCurves:
    """Miss-ratio curves of an LRU cache for each layer, by the number of its experts."""

    def __init__(self) -> None:
        self._stack = LruStack()
        self.by_layer: dict[int, PhaseCurves] = {}

    def add(self, lookups: Lookups) -> None:
        """Add the next lookups."""
        ones = np.ones(lookups.lookup_count, np.int64)
        distances = self._stack.distances(lookups.layer, lookups.place, ones, lookups.step)
        for layer in np.unique(lookups.layer).tolist():
            rows = lookups.layer == layer
            curves = self.by_layer.setdefault(layer, PhaseCurves())
            curves.add(lookups.part(rows), distances[rows], ones[rows])


class LruCurves:
    """Miss-ratio curves of LRU caches for the experts of `routed` layers.

    `whole` is by the bytes of one cache, and so is `uniform`, with a router that routes as often in
    each step, to all experts alike.
    """

    def __init__(self, routed: Mapping[int, FamilyShape]) -> None:
        self._lengths = lengths_by_layer(routed)
        expert_counts = np.zeros(max(routed) + 1, np.int64)
        for layer, family in routed.items():
            expert_counts[layer] = family.expert_count
        self._uniform_router = UniformRouter(expert_counts)
        self.whole, self.uniform = PhaseCurves(), PhaseCurves()
        self._stacks = LruStack(), LruStack()

    def add(self, lookups: Lookups) -> None:
        """Add the next lookups."""
        lengths = self._lengths[lookups.layer]
        whole, uniform = self._stacks
        zeros = np.zeros_like(lengths)
        distances = whole.distances(zeros, lookups.place, lengths, lookups.step)
        self.whole.add(lookups, distances, lengths)
        places = self._uniform_router.places(lookups)
        distances = uniform.distances(zeros, places, lengths, lookups.step)
        self.uniform.add(lookups, distances, lengths)


class UniformRouter:
    """Replaces the experts of a trace's lookups by uniformly random ones, the same each time.

    `expert_counts` [layers] are by the layer's number.
    """

    def __init__(self, expert_counts: Ints) -> None:
        self._counts = expert_counts
        self._first = np.concatenate(([0], np.cumsum(expert_counts)))
        self._random = np.random.Generator(np.random.SFC64(0))

    def places(self, lookups: Lookups) -> Ints:
        """Return a place for each lookup, no two alike in a step: experts layer after layer."""
        count = self._counts[lookups.layer]
        experts = self._random.integers(0, count)
        starts = lookups.step_starts
        used = np.diff(np.append(starts, lookups.lookup_count))
        # If a step uses most of the experts, drawing until all differ would take long.
        crowded = used * 2 > count[starts]
        for start, number in zip(starts[crowded].tolist(), used[crowded].tolist(), strict=True):
            order = self._random.permutation(int(count[start]))
            experts[start : start + number] = order[:number]
        width = int(self._counts.max())
        while len(again := repeated(lookups.step * width + experts)):
            experts[again] = self._random.integers(0, count[again])
        return experts + self._first[lookups.layer]


MOST_TOKENS = 1 << 13
"""Limit of decoded tokens, the first of a trace: each takes some 0.2 ms."""


class LayerLru:
    """Follows the lookups of each layer. Caches go on over requests.

    Lookups follow the rules of simulation: prefill warms the caches, hits are those of decode, and
    a step evicts none of its own experts. So a cache of fewer experts than a token uses in its
    layer has no hit rate: it would have to exceed its size.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._curves = LayerCurves()
        self._lookups = LookupStream(self._curves.add, None)

    @property
    def token_count(self) -> int:
        """The number of decoded tokens that count."""
        return self._lookups.decode_token_count

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        left = self._most_tokens - self.token_count
        if left <= 0:
            return
        if isinstance(item, Tokens):
            is_counted = np.cumsum(item.phase != Phase.PREFILL) <= left
            if not is_counted.all():
                item = selected(item, np.repeat(is_counted, np.diff(item.starts)))
        self._lookups.add(item)

    def hit_rate(self, capacities: Mapping[int, int]) -> float | None:
        """Return the hit rate of caches of so many experts, by layer.

        None without lookups, and if a token uses more experts of a layer than its cache has.
        """
        self._lookups.end()
        layers = capacities.keys() & self._curves.by_layer.keys()
        if any(capacities[layer] < self._lookups.used(layer) for layer in layers):
            return None
        tallies = [self._curves.by_layer[layer].decode.tally(capacities[layer]) for layer in layers]
        hit_count = sum(tally.hit_count for tally in tallies)
        count = hit_count + sum(tally.miss_count for tally in tallies)
        return hit_count / count if count else None
