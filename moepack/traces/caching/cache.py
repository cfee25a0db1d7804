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
    LeastRecentlyFrequentlyUsed,
    LeastRecentlyUsed,
    Policy,
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


class SimulatedCache:
    """A cache of experts within `budget` bytes; `lengths` are the bytes of every expert."""

    def __init__(self, budget: int, lengths: Mapping[ExpertKey, int], policy: Policy) -> None:
        self.budget = budget
        self._lengths = lengths
        self._policy = policy
        self._length = 0
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
