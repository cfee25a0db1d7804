"""A cache of experts, looked up step by step: which are resident, and which is evicted next.

Simulation and running share these rules; native/residents.c has them for programs:

- a step is one layer's routing for all tokens of one call of the model: it looks each expert up
  once, however many tokens were routed to it, in the order of their last routing;
- missing experts are always admitted;
- a step never evicts its own experts, so it may be larger than the budget: then the cache is over
  it until the next step.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey


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


class Policy(Protocol):
    """Orders the resident experts, and no others."""

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Record the experts that a step of a layer uses, in order, and newly admitted `misses`."""

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict one expert that is not in `kept` and return it; None if there is no candidate.

        `kept` has all experts of the last step.
        """


class LeastRecentlyUsed:
    """LRU: evict the expert with the oldest last use."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Move used experts to the end."""
        order = self._order
        for key in misses:
            order[key] = None
        for key in keys:
            order.move_to_end(key)

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict the first."""
        key = next((key for key in self._order if key not in kept), None)
        if key is not None:
            del self._order[key]
        return key


class LeastRecentlyFrequentlyUsed:
    """LRFU (Lee et al. 2001): evict the expert whose uses count least.

    Counts are halved every HALF_LIFE calls, and experts of their layer's last step count more. They
    go on while an expert is not resident. Of those alike, the layer computed last goes first: its
    turn is furthest away.
    """

    HALF_LIFE = 16
    """Calls of the model; one begins with each step of the lowest layer so far."""
    _USE = 1 << 32
    _RECENT = HALF_LIFE * _USE

    def __init__(self) -> None:
        self._counts: dict[ExpertKey, int] = {}
        self._last_uses: dict[ExpertKey, int] = {}
        self._last_steps: dict[int, int] = {}
        """By layer, the time at which its last step began; time counts uses."""
        self._resident: dict[int, set[ExpertKey]] = {}
        """By layer."""
        self._queues: dict[int, list[tuple[int, int, ExpertKey]]] = {}
        """By layer, rank, last use and name, the least last; none where anything has changed."""
        self._time = self._call_count = 0
        self._latest, self._lowest = 0, sys.maxsize
        """Layers of the steps so far."""

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Count a use of each."""
        if layer <= self._lowest:
            self._lowest = layer
            self._begin_call()
        self._queues.pop(self._latest, None)  # its experts may be evicted from now on
        self._queues.pop(layer, None)
        self._latest = layer
        self._last_steps[layer] = self._time
        self._resident.setdefault(layer, set()).update(misses)
        for time, key in enumerate(keys, self._time):
            self._counts[key] = self._counts.get(key, 0) + self._USE
            self._last_uses[key] = time
        self._time += len(keys)

    def _begin_call(self) -> None:
        self._call_count += 1
        if self._call_count % self.HALF_LIFE == 0:
            self._counts = {key: count // 2 for key, count in self._counts.items()}
            self._queues.clear()

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict the least; of layers alike, the one whose turn is furthest away."""
        for layer in self._resident.keys() - self._queues.keys():
            self._queues[layer] = self._sorted(layer, kept)
        ranks = {layer: queue[-1][0] for layer, queue in self._queues.items() if queue}
        if not ranks:
            return None
        least = min(ranks.values())
        alike = [layer for layer, rank in ranks.items() if rank == least]
        layer = max(alike, key=lambda layer: (layer <= self._latest, layer))
        key = self._queues[layer].pop()[-1]
        self._resident[layer].remove(key)
        return key

    def _sorted(self, layer: int, kept: Container[ExpertKey]) -> list[tuple[int, int, ExpertKey]]:
        last_step, queue = self._last_steps[layer], []
        for key in self._resident[layer]:
            if key not in kept:
                last_use = self._last_uses[key]
                recent = self._RECENT if last_use >= last_step else 0
                queue.append((self._counts[key] + recent, last_use, key))
        return sorted(queue, reverse=True)


class SimulatedCache:
    """A cache of experts within `budget` bytes; `lengths` are the bytes of every expert."""

    def __init__(self, budget: int, lengths: Mapping[ExpertKey, int], policy: Policy) -> None:
        self.budget = budget
        self._lengths = lengths
        self._policy = policy
        self._length = 0
        self._resident: set[ExpertKey] = set()

    def step(self, routed: Sequence[ExpertKey], tally: Tally) -> list[ExpertKey]:
        """Look up a step's experts, and count them; return those that are missing.

        `routed` are one or more experts of one layer, repeated for each token.
        """
        used = frozenset(routed)
        keys = routed
        if len(used) < len(routed):
            keys = list(dict.fromkeys(reversed(routed)))[::-1]
        misses: list[ExpertKey] = []
        if not used <= self._resident:
            misses = [key for key in keys if key not in self._resident]
            self._resident.update(misses)
            missed_length = sum([self._lengths[key] for key in misses])
            self._length += missed_length
            tally.miss_count += len(misses)
            tally.missed_length += missed_length
        tally.hit_count += len(keys) - len(misses)
        self._policy.record(keys[0].layer, keys, misses)
        while self._length > self.budget:
            evicted = self._policy.evict(used)
            if evicted is None:
                break
            self._resident.remove(evicted)
            self._length -= self._lengths[evicted]
        return misses


_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "lrfu": LeastRecentlyFrequentlyUsed,
    "lru": LeastRecentlyUsed,
}
POLICIES = tuple(_POLICIES)
DEFAULT_POLICY = POLICIES[0]


def make(policy: str, budget: int, lengths: Mapping[ExpertKey, int]) -> SimulatedCache:
    """Make a cache that evicts by `policy`, one of POLICIES; raise RequestError for another."""
    check_policy(policy, POLICIES)
    return SimulatedCache(budget, lengths, _POLICIES[policy]())


def check_policy(policy: str, names: Sequence[str]) -> None:
    """Raise RequestError for a policy that is not one of `names`."""
    if policy not in names:
        raise RequestError("no such policy", expected=", ".join(names), found=policy)
