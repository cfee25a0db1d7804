"""A cache of experts, looked up step by step: which are resident, missing, evicted.

Simulation and running share these rules:

- a step is one layer's routing for all tokens of one call of the model: it looks each expert up
  once, however many tokens were routed to it, in the order of their last routing;
- missing experts are always admitted;
- a step never evicts its own experts, so it may be larger than the budget: then the cache is over
  it until the next step.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.common.sizes import size_text
from moepack.traces.caching.policies import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastStale,
    Policy,
    RandomEviction,
    S3Fifo,
)


class Lookup(NamedTuple):
    """The outcome of a step: experts to read, and experts to evict before that."""

    misses: list[ExpertKey]
    evicted: list[ExpertKey]


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
    whole_length: int = 0
    """The bytes of all experts there are."""
    length: int = 0
    favoured_length: int = 0


class SimulatedCache:
    """A cache of experts within `budget` bytes.

    `lengths` are the bytes of every expert there is. `pinned` experts are resident from the start,
    and never evicted. With `by_layer` each layer has an equal share of the budget to itself. Raises
    RequestError if pinned experts are larger than the budget, or than their layer's share.
    """

    def __init__(
        self,
        budget: int,
        lengths: Mapping[ExpertKey, int],
        policy: Callable[[], Policy],
        pinned: Iterable[ExpertKey] = (),
        *,
        by_layer: bool = False,
    ) -> None:
        self.budget = budget
        self._lengths = lengths
        layers = dict.fromkeys(key.layer for key in lengths)
        count = len(layers) if by_layer else 1
        self._partitions = [_Partition(budget // max(1, count), policy()) for _ in range(count)]
        self._by_layer = {
            layer: self._partitions[number if by_layer else 0]
            for number, layer in enumerate(layers)
        }
        for key, length in lengths.items():
            self._by_layer[key.layer].whole_length += length
        self._resident = set(pinned)
        self._unordered = set(self._resident)
        """Experts that no policy knows: pinned and favoured ones."""
        self._favoured: dict[ExpertKey, None] = {}
        """Experts that are evicted only if nothing else can be, the first one last."""
        for key in self._resident:
            self._by_layer[key.layer].length += lengths[key]
        for partition in self._partitions:
            if partition.length > partition.budget:
                raise RequestError(
                    "the pinned experts are larger than the budget",
                    expected=f"up to {size_text(partition.budget)}",
                    found=size_text(partition.length),
                )

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    @property
    def resident_length(self) -> int:
        """The bytes of all resident experts."""
        return sum(partition.length for partition in self._partitions)

    @property
    def fits_all(self) -> bool:
        """Whether all experts fit into the budget together: none is evicted then."""
        return all(partition.whole_length <= partition.budget for partition in self._partitions)

    def step(self, routed: Sequence[ExpertKey], tally: Tally) -> Lookup:
        """Look up a step's experts, and count them.

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
        if self._unordered:
            keys = [key for key in keys if key not in self._unordered]
        partition.policy.record(layer, keys, misses)
        return Lookup(misses, self._shrink(partition, used))

    def _shrink(self, partition: _Partition, kept: frozenset[ExpertKey]) -> list[ExpertKey]:
        evicted = []
        while partition.length > partition.budget:
            key = self._evict_from(partition, kept)
            if key is None:
                break
            evicted.append(key)
        return evicted

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict an expert that is not in `kept` and return it; None if there is none.

        It is one of the fullest layer with a candidate if layers have budgets of their own.
        """
        for partition in sorted(self._partitions, key=lambda one: -one.length):
            key = self._evict_from(partition, kept)
            if key is not None:
                return key
        return None

    def _evict_from(self, partition: _Partition, kept: Container[ExpertKey]) -> ExpertKey | None:
        key = partition.policy.evict(kept)
        if key is None:
            for favoured in reversed(self._favoured):
                if favoured not in kept and self._by_layer[favoured.layer] is partition:
                    key = favoured
                    self._remove_from_order(key)
                    break
        if key is not None:
            self._resident.remove(key)
            partition.length -= self._lengths[key]
        return key

    def admit(self, key: ExpertKey) -> bool:
        """Admit an expert without a lookup if there is room; return whether it is new."""
        partition, length = self._by_layer[key.layer], self._lengths[key]
        if key in self._resident or partition.length + length > partition.budget:
            return False
        self._resident.add(key)
        partition.length += length
        partition.policy.record(key.layer, [key], [key])
        return True

    def refresh(self, keys: Iterable[ExpertKey]) -> None:
        """Order resident experts as if steps had just used them in turn."""
        for key in keys:
            if key in self._resident and key not in self._unordered:
                self._by_layer[key.layer].policy.record(key.layer, [key], [])

    def favour(self, key: ExpertKey) -> None:
        """Evict a resident expert only if nothing else can be evicted.

        The first favoured experts go last. They take half of the budget at most.
        """
        partition, length = self._by_layer[key.layer], self._lengths[key]
        is_ordered = key in self._resident and key not in self._unordered
        if is_ordered and 2 * (partition.favoured_length + length) <= partition.budget:
            partition.policy.remove(key)
            partition.favoured_length += length
            self._favoured[key] = None
            self._unordered.add(key)

    def _remove_from_order(self, key: ExpertKey) -> None:
        partition = self._by_layer[key.layer]
        if key in self._favoured:
            del self._favoured[key]
            self._unordered.remove(key)
            partition.favoured_length -= self._lengths[key]
        elif key not in self._unordered:
            partition.policy.remove(key)

    def evictable(self) -> set[ExpertKey]:
        """Return the resident experts that are neither pinned nor favoured."""
        return self._resident - self._unordered

    def resize(self, budget: int) -> list[ExpertKey]:
        """Set another budget, no less than pinned experts take; return the experts to evict."""
        self.budget = budget
        evicted = []
        for partition in self._partitions:
            partition.budget = budget // len(self._partitions)
            evicted += self._shrink(partition, frozenset())
        return evicted

    def drop(self, keys: Iterable[ExpertKey]) -> None:
        """Remove experts, such as after failed reads."""
        for key in keys:
            self._remove_from_order(key)
            self._resident.remove(key)
            self._by_layer[key.layer].length -= self._lengths[key]


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


def make(
    policy: str, budget: int, lengths: Mapping[ExpertKey, int], pinned: Iterable[ExpertKey] = ()
) -> SimulatedCache:
    """Make a cache that evicts by `policy`, one of POLICIES.

    Raises RequestError for another name, and for pinned experts that are larger than the budget.
    """
    if policy not in POLICIES:
        raise RequestError("no such policy", expected=", ".join(POLICIES), found=policy)
    order, by_layer = _KINDS[policy]
    return SimulatedCache(budget, lengths, order, pinned, by_layer=by_layer)
