"""The hit rates of LRU caches of each layer, of every size at once.

Lookups follow the rules of simulation: prefill warms the caches, hits are those of decode, and a
step evicts none of its own experts. So a cache of fewer experts than a token uses in its layer has
no hit rate: it would have to exceed its size.
"""

from collections.abc import Mapping

import numpy as np

from moepack.traces.model import Item
from moepack.traces.simulation.curves import MissRatioCurve
from moepack.traces.simulation.lookups import Lookups, LookupStream
from moepack.traces.simulation.stack import LruStack

MOST_TOKENS = 1 << 13
"""Limit of decoded tokens, the first of a trace: each takes some 0.2 ms."""


class LayerLru:
    """Follows the lookups of each layer. Caches go on over requests."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._lookups = LookupStream(self._add_lookups, None)
        self._stack = LruStack()
        self._curves: dict[int, MissRatioCurve] = {}
        self._call_count = 0
        self._last_call = -1

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        if self._lookups.decode_token_count < self._most_tokens:
            self._lookups.add(item)

    @property
    def token_count(self) -> int:
        """The number of decoded tokens that count."""
        self._lookups.end()
        return self._call_count

    def hit_rate(self, capacities: Mapping[int, int]) -> float | None:
        """Return the hit rate of caches of so many experts, by layer.

        None without lookups, and if a token uses more experts of a layer than its cache has.
        """
        self._lookups.end()
        layers = [layer for layer in capacities if layer in self._curves]
        if any(capacities[layer] < self._lookups.used(layer) for layer in layers):
            return None
        tallies = [self._curves[layer].tally(capacities[layer]) for layer in layers]
        hit_count = sum(tally.hit_count for tally in tallies)
        count = hit_count + sum(tally.miss_count for tally in tallies)
        return hit_count / count if count else None

    def _add_lookups(self, lookups: Lookups) -> None:
        ones = np.ones(lookups.lookup_count, np.int64)
        distances = self._stack.distances(lookups.layer, lookups.place, ones, lookups.step)
        is_decode = lookups.is_decode
        decoded, distances = lookups.part(is_decode), distances[is_decode]
        number = self._call_count + np.cumsum(np.diff(decoded.call, prepend=self._last_call) != 0)
        if decoded.lookup_count:
            self._last_call = int(decoded.call[-1])
            self._call_count = min(int(number[-1]), self._most_tokens)
        for layer in np.unique(decoded.layer).tolist():
            here = (decoded.layer == layer) & (number <= self._most_tokens)
            curve = self._curves.setdefault(layer, MissRatioCurve())
            curve.add(distances[here], ones[: len(distances)][here])
