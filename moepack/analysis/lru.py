"""The hit rate of an LRU cache in each layer, of every size at once.

By the rules of simulation, of which these are the lookups: prefill warms the caches, hits are those
of decode, and a step keeps what it uses. So a cache of fewer experts than a token uses in its layer
has no hit rate: it would hold more than that.
"""

from collections.abc import Mapping

import numpy as np

from moepack.simulation.curve import Curve
from moepack.simulation.lookups import Lookups, LookupStream
from moepack.simulation.stack import LruStack
from moepack.trace.model import Item

MOST_TOKENS = 1 << 13
"""Of a longer trace the first so many decoded tokens are looked at: each takes some 0.2 ms."""


class LayerLru:
    """Follows the lookups of each layer. Caches go on over requests."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._lookups = LookupStream(self._take, None)
        self._stack = LruStack()
        self._curves: dict[int, Curve] = {}
        self._call_count = 0
        self._last_call = -1

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if self._lookups.decode_token_count < self._most_tokens:
            self._lookups.add(item)

    @property
    def token_count(self) -> int:
        """How many decoded tokens were looked at."""
        self._lookups.end()
        return self._call_count

    def hit_rate(self, capacities: Mapping[int, int]) -> float | None:
        """Return the share of lookups that hit in caches of so many experts, by layer.

        None where there are no lookups, or a layer's token uses more experts than its cache holds.
        """
        self._lookups.end()
        layers = [layer for layer in capacities if layer in self._curves]
        if any(capacities[layer] < self._lookups.used(layer) for layer in layers):
            return None
        tallies = [self._curves[layer].tally(capacities[layer]) for layer in layers]
        hit_count = sum(tally.hit_count for tally in tallies)
        count = hit_count + sum(tally.miss_count for tally in tallies)
        return hit_count / count if count else None

    def _take(self, lookups: Lookups) -> None:
        ones = np.ones(lookups.lookup_count, np.int64)
        needs = self._stack.needs(lookups.layer, lookups.place, ones, lookups.step)
        is_decode = lookups.is_decode
        decoded, needs = lookups.part(is_decode), needs[is_decode]
        number = self._call_count + np.cumsum(np.diff(decoded.call, prepend=self._last_call) != 0)
        if decoded.lookup_count:
            self._last_call = int(decoded.call[-1])
            self._call_count = min(int(number[-1]), self._most_tokens)
        for layer in np.unique(decoded.layer).tolist():
            chosen = (decoded.layer == layer) & (number <= self._most_tokens)
            self._curves.setdefault(layer, Curve()).add(needs[chosen], ones[: len(needs)][chosen])
