"""Cache policies: the order in which resident experts are evicted. They know no bytes."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol

from moepack.common.shape import ExpertKey

_BITS = (1 << 64) - 1


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
        key = _first(self._order, kept)
        if key is not None:
            del self._order[key]
        return key


class Ranking:
    """Resident experts by `rank`, the least first; ranks change before a step is put."""

    def __init__(self, rank: Callable[[ExpertKey], int]) -> None:
        self._rank = rank
        self._resident: set[ExpertKey] = set()
        # An entry with less than its expert's rank is put right when it comes up; one with more
        # comes up after the right one. There are so many of them at most, that each use costs no
        # more than its own.
        self._queue: list[tuple[int, ExpertKey]] = []
        self._kept: list[ExpertKey] = []
        """Experts that join the queue with the next step, as they cannot be popped before that."""

    def put(self, keys: Iterable[ExpertKey]) -> None:
        """Add a step's experts: at least admitted ones, and ones of lower rank than before."""
        rank, queue = self._rank, self._queue
        for key in self._kept:
            heapq.heappush(queue, (rank(key), key))
        self._kept = list(keys)
        self._resident.update(keys)
        if len(queue) > 64 + 4 * len(self._resident):
            self._queue = [(rank(key), key) for key in self._resident.difference(self._kept)]
            heapq.heapify(self._queue)

    def pop(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Remove the first that is not in `kept`, the last step's experts; None without one."""
        queue = self._queue
        while queue:
            rank, key = heapq.heappop(queue)
            if key not in self._resident:
                continue
            if key in kept:
                self._kept.append(key)
            elif rank < (now := self._rank(key)):
                heapq.heappush(queue, (now, key))
            else:
                self._resident.remove(key)
                return key
        return None


class LeastFrequentlyUsed:
    """LFU: evict the expert that the fewest steps used, among equals by LRU.

    Uses are counted from the first, also while an expert is not resident: otherwise an expert that
    comes back would begin again, and be evicted next.
    """

    _TIME = (1 << 48) - 1
    """The bits of a rank that are the time of the last use; those above count uses."""

    def __init__(self) -> None:
        self._ranks: dict[ExpertKey, int] = {}
        self._clock = 0
        self._ranking = Ranking(self._ranks.__getitem__)
        self.evict = self._ranking.pop

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Count a use of each."""
        ranks, all_time = self._ranks, self._TIME
        for clock, key in enumerate(keys, self._clock):
            ranks[key] = (ranks.get(key, 0) | all_time) + 1 + clock
        self._clock += len(keys)
        self._ranking.put(misses)


class LeastStale:
    """Evict first experts that their layer's last step did not use, by LRU.

    Of the rest it evicts the experts of the layer that was computed last, whose turn is furthest
    away. So it is LRU that knows that layers come in turns. The idea and the name are of SpecMD
    (arXiv 2602.03921); the rule for the rest is ours.
    """

    def __init__(self) -> None:
        self._stale: OrderedDict[ExpertKey, None] = OrderedDict()
        self._fresh: OrderedDict[int, dict[ExpertKey, None]] = OrderedDict()
        """By layer, the layer of the last step last: the experts of its last step."""

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Make a step's experts fresh, and those of its layer's step before stale."""
        before = self._fresh.pop(layer, {})
        fresh = dict.fromkeys(keys)
        for key in before:
            if key not in fresh:
                self._stale[key] = None
        for key in keys:
            if key not in before:
                self._stale.pop(key, None)
        self._fresh[layer] = fresh

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict a stale expert, or one of the furthest turn."""
        for experts in (self._stale, *reversed(self._fresh.values())):
            key = _first(experts, kept)
            if key is not None:
                self._remove(key)
                return key
        return None

    def _remove(self, key: ExpertKey) -> None:
        if key in self._stale:
            del self._stale[key]
            return
        fresh = self._fresh[key.layer]
        del fresh[key]
        if not fresh:
            del self._fresh[key.layer]


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for new experts, a main one for the rest.

    An expert that is used twice more in the small queue moves to the main one; one that left the
    small queue and comes back soon goes there at once. Queues are measured in experts; the small
    one is a tenth.
    """

    _SMALL_SHARE = 10
    _MOST_USES = 3

    def __init__(self) -> None:
        self._uses: dict[ExpertKey, int] = {}
        self._small: OrderedDict[ExpertKey, None] = OrderedDict()
        self._main: OrderedDict[ExpertKey, None] = OrderedDict()
        self._ghosts: OrderedDict[ExpertKey, None] = OrderedDict()

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Count a use of each resident expert; queue new ones."""
        uses, most = self._uses, self._MOST_USES
        for key in keys:
            if uses.get(key, most) < most:
                uses[key] += 1
        for key in misses:
            uses[key] = 0
            if key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = None
            else:
                self._small[key] = None

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict the first of its queue that is not to stay."""
        # Each turn evicts one, uses one up or moves one on, so this ends.
        while True:
            count = len(self._small) + len(self._main)
            queues = [self._small, self._main]
            if len(self._small) * self._SMALL_SHARE < count:
                queues.reverse()
            key = _first(itertools.chain(*queues), kept)
            if key is None:
                return None
            leaves = self._leaves_small if key in self._small else self._leaves_main
            if leaves(key):
                return key

    def _leaves_small(self, key: ExpertKey) -> bool:
        del self._small[key]
        uses = self._uses.pop(key)
        if uses > 1:
            self._main[key] = None
            self._uses[key] = 0
            return False
        self._ghosts[key] = None
        while len(self._ghosts) > len(self._small) + len(self._main):
            self._ghosts.popitem(last=False)
        return True

    def _leaves_main(self, key: ExpertKey) -> bool:
        uses = self._uses.pop(key)
        if uses:
            self._main.move_to_end(key)
            self._uses[key] = uses - 1
        else:
            del self._main[key]
        return not uses


class RandomEviction:
    """Evict any expert, as a policy that knows nothing does. The same each time."""

    def __init__(self) -> None:
        self._keys: list[ExpertKey] = []
        self._index: dict[ExpertKey, int] = {}
        self._state = 0

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Record newly admitted experts."""
        for key in misses:
            self._index[key] = len(self._keys)
            self._keys.append(key)

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict any."""
        count = len(self._keys)
        start = self._draw() % count if count else 0
        for number in range(count):
            key = self._keys[(start + number) % count]
            if key not in kept:
                self._remove(key)
                return key
        return None

    def _draw(self) -> int:
        """Return the next 64 bits of SplitMix64 (Steele, Lea and Flood 2014)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _BITS
        x = self._state
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _BITS
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _BITS
        return x ^ x >> 31

    def _remove(self, key: ExpertKey) -> None:
        index, last = self._index.pop(key), self._keys.pop()
        if last != key:
            self._keys[index] = last
            self._index[last] = index


def _first(keys: Iterable[ExpertKey], kept: Container[ExpertKey]) -> ExpertKey | None:
    return next((key for key in keys if key not in kept), None)
