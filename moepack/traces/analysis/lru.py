"""The hit rates of LRU caches of each layer, of every size at once.

Lookups follow the rules of simulation: prefill warms the caches, hits are those of decode, and a
step evicts none of its own experts. So a cache of fewer experts than a token uses in its layer has
no hit rate: it would have to exceed its size.
"""

from collections.abc import Mapping

import numpy as np

from moepack.traces.model import Item, Phase, Tokens, selected
from moepack.traces.simulation.curves import LayerCurves
from moepack.traces.simulation.lookups import LookupStream

MOST_TOKENS = 1 << 13
"""Limit of decoded tokens, the first of a trace: each takes some 0.2 ms."""


class LayerLru:
    """Follows the lookups of each layer. Caches go on over requests."""

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
