"""Which expert a cache gives up first. A policy knows no bytes: it orders what is held."""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol

from moepack.keys import ExpertKey


class Policy(Protocol):
    """Orders the experts that are held, and no others."""

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note what a step of a layer uses, in order; of that, `misses` are held from now on."""

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let an expert go, and return it; None where there is none.

        It is none of `kept`, which is what the last step uses.
        """

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""


class LeastRecentlyUsed:
    """LRU: gives up the expert whose last use is longest ago."""

    def __init__(self) -> None:
        self._held: OrderedDict[ExpertKey, None] = OrderedDict()

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note a step."""
        held = self._held
        for key in misses:
            held[key] = None
        for key in keys:
            held.move_to_end(key)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first."""
        found = _first(self._held, kept)
        if found is not None:
            del self._held[found]
        return found

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        del self._held[key]


class Ranking:
    """Experts that are held by `rank`, the least first; a step changes ranks before it is put."""

    def __init__(self, rank: Callable[[ExpertKey], int]) -> None:
        self._rank = rank
        self._held: set[ExpertKey] = set()
        # An entry with less than its expert's rank is put right when it comes up; one with more
        # comes up after the right one. There are so many of them at most, that each use costs no
        # more than its own.
        self._queue: list[tuple[int, ExpertKey]] = []
        self._kept: list[ExpertKey] = []
        """What comes into the queue with the next step, as it cannot be taken before that."""

    def put(self, keys: Iterable[ExpertKey]) -> None:
        """Hold what a step uses: at least what was not held, and experts whose ranks fell."""
        rank, queue = self._rank, self._queue
        for key in self._kept:
            heapq.heappush(queue, (rank(key), key))
        self._kept = list(keys)
        self._held.update(keys)
        if len(queue) > 64 + 4 * len(self._held):
            self._queue = [(rank(key), key) for key in self._held.difference(self._kept)]
            heapq.heapify(self._queue)

    def take(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Remove the first that is not in `kept`, what the last step used; None without one."""
        queue = self._queue
        while queue:
            rank, key = heapq.heappop(queue)
            if key not in self._held:
                continue
            if key in kept:
                self._kept.append(key)
            elif rank < (now := self._rank(key)):
                heapq.heappush(queue, (now, key))
            else:
                self._held.remove(key)
                return key
        return None

    def remove(self, key: ExpertKey) -> None:
        """Remove an expert."""
        self._held.remove(key)


class LeastFrequentlyUsed:
    """LFU: gives up the expert that was used in the fewest steps, of several the one of LRU.

    Uses are counted from the first, also while an expert is not held: else what comes back would
    begin again, and be given up next.
    """

    _TIME = (1 << 48) - 1
    """The bits of a rank that are the time of the last use; those above count uses."""

    def __init__(self) -> None:
        self._ranks: dict[ExpertKey, int] = {}
        self._clock = 0
        self._held = Ranking(self._ranks.__getitem__)

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note a step."""
        ranks, all_time = self._ranks, self._TIME
        for clock, key in enumerate(keys, self._clock):
            ranks[key] = (ranks.get(key, 0) | all_time) + 1 + clock
        self._clock += len(keys)
        self._held.put(misses)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first."""
        return self._held.take(kept)

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        self._held.remove(key)


class LeastStale:
    """Gives up first what its layer's last step did not use, of that the least recently used.

    Of the rest it gives up what comes up last again: the experts of the layer that was computed
    last. So it is LRU that knows that layers come in turns. The idea and the name are of SpecMD
    (arXiv 2602.03921); the rule for the rest is ours.
    """

    def __init__(self) -> None:
        self._stale: OrderedDict[ExpertKey, None] = OrderedDict()
        self._fresh: OrderedDict[int, dict[ExpertKey, None]] = OrderedDict()
        """By layer, the layer of the last step last: what its last step used."""

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note a step; what the layer's step before used is stale until it is used again."""
        before = self._fresh.pop(layer, {})
        fresh = dict.fromkeys(keys)
        for key in before:
            if key not in fresh:
                self._stale[key] = None
        for key in keys:
            if key not in before:
                self._stale.pop(key, None)
        self._fresh[layer] = fresh

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what is stale, or comes up last again."""
        found = _first(self._stale, kept)
        if found is not None:
            del self._stale[found]
            return found
        for layer in reversed(self._fresh):
            found = _first(self._fresh[layer], kept)
            if found is not None:
                self._remove_fresh(found)
                return found
        return None

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        if key in self._stale:
            del self._stale[key]
        else:
            self._remove_fresh(key)

    def _remove_fresh(self, key: ExpertKey) -> None:
        held = self._fresh[key.layer]
        del held[key]
        if not held:
            del self._fresh[key.layer]


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for the rest.

    What is used twice more in the small queue moves to the main one; what left the small queue
    and comes back soon goes there at once. Queues are measured in experts; the small one is a
    tenth.
    """

    _SMALL_SHARE = 10
    _MOST_USES = 3

    def __init__(self) -> None:
        self._uses: dict[ExpertKey, int] = {}
        self._small: OrderedDict[ExpertKey, None] = OrderedDict()
        self._main: OrderedDict[ExpertKey, None] = OrderedDict()
        self._ghosts: OrderedDict[ExpertKey, None] = OrderedDict()

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note a step: it counts for what was held; what was not comes last."""
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

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first in its queue and is not to stay."""
        # Each turn lets one go, uses one up or moves one on, so this ends.
        while True:
            held = len(self._small) + len(self._main)
            queues = [self._small, self._main]
            if len(self._small) * self._SMALL_SHARE < held:
                queues.reverse()
            found = _first(itertools.chain(*queues), kept)
            if found is None:
                return None
            leaves = self._leaves_small if found in self._small else self._leaves_main
            if leaves(found):
                return found

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

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        del self._uses[key]
        for queue in (self._small, self._main):
            queue.pop(key, None)


class AnyOne:
    """Gives up any expert: what a policy that knows nothing comes to. The same each time."""

    def __init__(self) -> None:
        self._held: list[ExpertKey] = []
        self._place: dict[ExpertKey, int] = {}
        self._random = random.Random(0)

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note what is held from now on."""
        for key in misses:
            self._place[key] = len(self._held)
            self._held.append(key)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let any go."""
        count = len(self._held)
        start = self._random.randrange(count) if count else 0
        for number in range(count):
            key = self._held[(start + number) % count]
            if key not in kept:
                self.forget(key)
                return key
        return None

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        place, last = self._place.pop(key), self._held.pop()
        if last != key:
            self._held[place] = last
            self._place[last] = place


def _first(held: Iterable[ExpertKey], kept: Container[ExpertKey]) -> ExpertKey | None:
    for key in held:
        if key not in kept:
            return key
    return None
