"""A cache of experts, looked up step by step: which are resident and which are missing.

Simulation and running share these rules; native/residents.c has them for programs:

- a step is one layer's routing for all tokens of one call of the model: it looks each expert up
  once, however many tokens were routed to it, in the order of their last routing;
- missing experts are always admitted;
- a step never evicts its own experts, so it may be larger than the budget: then the cache is over
  it until the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.traces.caching.policies import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastStale,
    Policy,
    RandomEviction,
    S3Fifo,
)


@dataclass(slots=True)
class Tally:
    """Counts of lookups that hit and missed, and the bytes that were missing."""

    hit_count: int = 0
    miss_count: int = 0
    missed_length: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that hit; None without lookups."""
        count = self.hit_count + self.miss_count
        return self.hit_count / count if count else None


@dataclass(slots=True)
class _Partition:
    """The bytes and the order of the resident experts that share a budget: a layer's, or all."""

    budget: int
    policy: Policy
    length: int = 0


class SimulatedCache:
    """A cache of experts within `budget` bytes.

    `lengths` are the bytes of every expert there is. With `by_layer` each layer has an equal share
    of the budget to itself.
    """

    def __init__(
        self,
        budget: int,
        lengths: Mapping[ExpertKey, int],
        policy: Callable[[], Policy],
        *,
        by_layer: bool = False,
    ) -> None:
        self.budget = budget
        self._lengths = lengths
        layers = dict.fromkeys(key.layer for key in lengths)
        count = len(layers) if by_layer else 1
        partitions = [_Partition(budget // max(1, count), policy()) for _ in range(count)]
        self._by_layer = {
            layer: partitions[number if by_layer else 0] for number, layer in enumerate(layers)
        }
        self._resident: set[ExpertKey] = set()

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def step(self, routed: Sequence[ExpertKey], tally: Tally) -> list[ExpertKey]:
        """Look up a step's experts, and count them; return those that are missing.

        `routed` are one or more experts of one layer, repeated for each token.
        """
        used = frozenset(routed)
        keys = routed
        if len(used) < len(routed):
            keys = list(dict.fromkeys(reversed(routed)))[::-1]
        layer = keys[0].layer
        partition = self._by_layer[layer]
        misses: list[ExpertKey] = []
        if not used <= self._resident:
            misses = [key for key in keys if key not in self._resident]
            self._resident.update(misses)
            missed_length = sum([self._lengths[key] for key in misses])
            partition.length += missed_length
            tally.miss_count += len(misses)
            tally.missed_length += missed_length
        tally.hit_count += len(keys) - len(misses)
        partition.policy.record(layer, keys, misses)
        while partition.length > partition.budget:
            evicted = partition.policy.evict(used)
            if evicted is None:
                break
            self._resident.remove(evicted)
            partition.length -= self._lengths[evicted]
        return misses


_KINDS: Mapping[str, tuple[Callable[[], Policy], bool]] = {
    "lru": (LeastRecentlyUsed, False),
    "lfu": (LeastFrequentlyUsed, False),
    "layer": (LeastRecentlyUsed, True),
    "layer+lfu": (LeastFrequentlyUsed, True),
    "s3fifo": (S3Fifo, False),
    "least-stale": (LeastStale, False),
    "random": (RandomEviction, False),
}
"""By name, the order in which experts are evicted, and whether each layer has its own cache."""
POLICIES = tuple(_KINDS)


def make(policy: str, budget: int, lengths: Mapping[ExpertKey, int]) -> SimulatedCache:
    """Make a cache that evicts by `policy`, one of POLICIES; raise RequestError for another."""
    if policy not in POLICIES:
        raise RequestError("no such policy", expected=", ".join(POLICIES), found=policy)
    order, by_layer = _KINDS[policy]
    return SimulatedCache(budget, lengths, order, by_layer=by_layer)
