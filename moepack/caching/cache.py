"""A cache of experts: for each step of a model, what is held, what is missing, what has to go.

The rules, which simulation and running share:

- a step is what a layer's router chose for all tokens of one call of the model: it looks each
  expert up once, however many tokens chose it; experts are used in the order of their last choice;
- what is missing always comes in;
- what a step uses is never given up for it, so a step may be larger than the budget: then the cache
  is over it until the next one.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.caching.policies import (
    AnyOne,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastStale,
    Policy,
    S3Fifo,
)
from moepack.errors import RequestError
from moepack.keys import ExpertKey
from moepack.sizes import size_text


class Step(NamedTuple):
    """What a step finds: experts that are to be read, and those to go before that."""

    misses: list[ExpertKey]
    given_up: list[ExpertKey]


@dataclass(slots=True)
class Tally:
    """Counts lookups: those that hit, those that missed, and the bytes that were missing."""

    hit_count: int = 0
    miss_count: int = 0
    missed_length: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that hit; None where there was none."""
        count = self.hit_count + self.miss_count
        return self.hit_count / count if count else None


class ExpertCache:
    """A cache that holds experts of `budget` bytes together.

    `lengths` are the bytes of each expert that there is. `pinned` are held from the start, and
    never given up. Raises RequestError where they are larger than the budget.
    """

    def __init__(
        self,
        budget: int,
        lengths: Mapping[ExpertKey, int],
        policy: Callable[[], Policy],
        pinned: Iterable[ExpertKey] = (),
    ) -> None:
        self.budget = budget
        self._lengths = lengths
        self._policy = policy()
        self._pinned = frozenset(pinned)
        self._favoured: dict[ExpertKey, None] = {}
        """What is evicted only where nothing else can be, the first last."""
        self._favoured_length = 0
        self._unordered: set[ExpertKey] = set(self._pinned)
        """What the policy does not know."""
        self._held: set[ExpertKey] = set(self._pinned)
        self.held_length = sum(lengths[key] for key in self._pinned)
        """The bytes of what is held."""
        if self.held_length > budget:
            raise RequestError(
                "the pinned experts are larger than the budget",
                expected=f"up to {size_text(budget)}",
                found=size_text(self.held_length),
            )

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def holds_all(self) -> bool:
        """Whether it holds all experts that there are: no step changes it any more."""
        return len(self._held) == len(self._lengths) and self.held_length <= self.budget

    def step(self, chosen: Sequence[ExpertKey], tally: Tally) -> Step:
        """Look up what a step chose, expert by expert as often as it was, and count it.

        A step chooses something, in one layer.
        """
        used = frozenset(chosen)
        keys = chosen
        if len(used) < len(chosen):
            keys = list(dict.fromkeys(reversed(chosen)))[::-1]
        misses: list[ExpertKey] = []
        if not used <= self._held:
            misses = [key for key in keys if key not in self._held]
            self._add(misses, tally)
        tally.hit_count += len(keys) - len(misses)
        layer = keys[0].layer
        if self._unordered:
            keys = [key for key in keys if key not in self._unordered]
        self._policy.use(layer, keys, misses)
        return Step(misses, self._shrink(used))

    def _add(self, misses: list[ExpertKey], tally: Tally) -> None:
        missed_length = sum([self._lengths[key] for key in misses])
        self._held.update(misses)
        self.held_length += missed_length
        tally.miss_count += len(misses)
        tally.missed_length += missed_length

    def _shrink(self, kept: frozenset[ExpertKey]) -> list[ExpertKey]:
        given_up = []
        while self.held_length > self.budget:
            key = self.evict(kept)
            if key is None:
                break
            given_up.append(key)
        return given_up

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict an expert that is not among `kept`; return it, None where there is none."""
        key = self._policy.give_up(kept)
        if key is None:
            key = next((one for one in reversed(self._favoured) if one not in kept), None)
            if key is not None:
                self._ignore(key)
        if key is not None:
            self._held.remove(key)
            self.held_length -= self._lengths[key]
        return key

    def admit(self, key: ExpertKey) -> bool:
        """Hold an expert that nothing chose, where there is room; return whether it is new."""
        if key in self._held or self.held_length + self._lengths[key] > self.budget:
            return False
        self._held.add(key)
        self.held_length += self._lengths[key]
        self._policy.use(key.layer, [key], [key])
        return True

    def refresh(self, keys: Iterable[ExpertKey]) -> None:
        """Order experts as if steps had used them now, in turn, as far as they are held."""
        for key in keys:
            if key in self._held and key not in self._unordered:
                self._policy.use(key.layer, [key], [])

    def favour(self, key: ExpertKey) -> None:
        """Evict an expert that is held only where nothing else can be evicted.

        The first that are favoured go last. They take half of the budget at most.
        """
        length = self._lengths[key]
        is_ordered = key in self._held and key not in self._unordered
        if is_ordered and 2 * (self._favoured_length + length) <= self.budget:
            self._policy.forget(key)
            self._favoured[key] = None
            self._unordered.add(key)
            self._favoured_length += length

    def _ignore(self, key: ExpertKey) -> None:
        """Order an expert no more, in whichever way it was."""
        if key in self._favoured:
            del self._favoured[key]
            self._unordered.remove(key)
            self._favoured_length -= self._lengths[key]
        elif key not in self._unordered:
            self._policy.forget(key)

    def evictable(self) -> set[ExpertKey]:
        """Return what is held, and neither pinned nor favoured."""
        return self._held - self._unordered

    def resize(self, budget: int) -> list[ExpertKey]:
        """Have another budget, of at least what is pinned; return what has to go for it."""
        self.budget = budget
        return self._shrink(frozenset())

    def drop(self, keys: Iterable[ExpertKey]) -> None:
        """Evict experts, as those that could not be read after all."""
        for key in keys:
            self._ignore(key)
            self._held.remove(key)
            self.held_length -= self._lengths[key]


class LayerCaches:
    """Caches that are each one layer's, and have the same share of `budget`."""

    def __init__(
        self,
        budget: int,
        lengths: Mapping[ExpertKey, int],
        policy: Callable[[], Policy],
        pinned: Iterable[ExpertKey] = (),
    ) -> None:
        self.budget = budget
        by_layer: dict[int, dict[ExpertKey, int]] = {}
        for key, length in lengths.items():
            by_layer.setdefault(key.layer, {})[key] = length
        kept = frozenset(pinned)
        share = budget // max(1, len(by_layer))
        self._caches = {
            layer: ExpertCache(share, held, policy, kept.intersection(held))
            for layer, held in by_layer.items()
        }

    @property
    def held_length(self) -> int:
        """The bytes of what is held."""
        return sum(cache.held_length for cache in self._caches.values())

    @property
    def holds_all(self) -> bool:
        """Whether all experts that there are are held; see `ExpertCache.holds_all`."""
        return all(cache.holds_all for cache in self._caches.values())

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._caches[key.layer]

    def step(self, chosen: Sequence[ExpertKey], tally: Tally) -> Step:
        """Look up what a step of one layer chose; see `ExpertCache.step`."""
        return self._caches[chosen[0].layer].step(chosen, tally)

    def evictable(self) -> set[ExpertKey]:
        """Return what is held, and neither pinned nor favoured."""
        return set[ExpertKey]().union(*(cache.evictable() for cache in self._caches.values()))

    def resize(self, budget: int) -> list[ExpertKey]:
        """Have another budget, shared as the first one; return what has to go for it."""
        self.budget = budget
        share = budget // max(1, len(self._caches))
        return [key for cache in self._caches.values() for key in cache.resize(share)]

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict an expert that is not among `kept`, of the fullest layer that has one."""
        for cache in sorted(self._caches.values(), key=lambda cache: -cache.held_length):
            key = cache.evict(kept)
            if key is not None:
                return key
        return None

    def admit(self, key: ExpertKey) -> bool:
        """Hold an expert that nothing chose; see `ExpertCache.admit`."""
        return self._caches[key.layer].admit(key)

    def refresh(self, keys: Iterable[ExpertKey]) -> None:
        """Order experts as if steps had used them; see `ExpertCache.refresh`."""
        for key in keys:
            self._caches[key.layer].refresh([key])

    def favour(self, key: ExpertKey) -> None:
        """Evict an expert last; see `ExpertCache.favour`."""
        self._caches[key.layer].favour(key)

    def drop(self, keys: Iterable[ExpertKey]) -> None:
        """Evict experts, as those that could not be read after all."""
        for key in keys:
            self._caches[key.layer].drop([key])


Cache = ExpertCache | LayerCaches

_KINDS: Mapping[str, tuple[type[ExpertCache] | type[LayerCaches], Callable[[], Policy]]] = {
    "lru": (ExpertCache, LeastRecentlyUsed),
    "lfu": (ExpertCache, LeastFrequentlyUsed),
    "layer": (LayerCaches, LeastRecentlyUsed),
    "layer+lfu": (LayerCaches, LeastFrequentlyUsed),
    "s3fifo": (ExpertCache, S3Fifo),
    "least-stale": (ExpertCache, LeastStale),
    "random": (ExpertCache, AnyOne),
}
POLICIES = tuple(_KINDS)


def make(
    policy: str,
    budget: int,
    lengths: Mapping[ExpertKey, int],
    pinned: Iterable[ExpertKey] = (),
) -> Cache:
    """Make the cache that gives up experts by `policy`, one of POLICIES: of all layers, or of each.

    Raises RequestError for another name, and for pinned experts that are larger than the budget.
    """
    if policy not in POLICIES:
        raise RequestError("no such policy", expected=", ".join(POLICIES), found=policy)
    kind, order = _KINDS[policy]
    return kind(budget, lengths, order, pinned)
