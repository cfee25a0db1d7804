"""Which expert a cache gives up first. A policy knows no bytes: it orders what is held."""

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Container
from typing import Protocol

from moepack.keys import ExpertKey


class Policy(Protocol):
    """Orders the experts that are held, and no others."""

    def begin(self, layer: int) -> None:
        """Note that a step of a layer begins."""

    def use(self, key: ExpertKey) -> None:
        """Note that a step uses an expert, which is held already, or from now on."""

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let an expert go that is not in `kept`, and return it; None where there is none."""

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""


class LeastRecentlyUsed:
    """LRU: gives up the expert whose last use is longest ago."""

    def __init__(self) -> None:
        self._held: OrderedDict[ExpertKey, None] = OrderedDict()

    def begin(self, layer: int) -> None:
        """Nothing: all steps are alike."""

    def use(self, key: ExpertKey) -> None:
        """Note a use."""
        self._held[key] = None
        self._held.move_to_end(key)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first."""
        found = next((key for key in self._held if key not in kept), None)
        if found is not None:
            del self._held[found]
        return found

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        del self._held[key]


class Ranking:
    """Experts by rank, the least first. A rank may change, but not back to one that it was."""

    def __init__(self) -> None:
        self._rank: dict[ExpertKey, tuple[int, ...]] = {}
        # An entry that is out of date is left out when it comes up; so many of them at most, that
        # each use costs no more than its own.
        self._queue: list[tuple[tuple[int, ...], ExpertKey]] = []

    def put(self, key: ExpertKey, rank: tuple[int, ...]) -> None:
        """Give an expert a rank, or another one."""
        self._rank[key] = rank
        heapq.heappush(self._queue, (rank, key))
        if len(self._queue) > 64 + 4 * len(self._rank):
            self._queue = [(rank, key) for key, rank in self._rank.items()]
            heapq.heapify(self._queue)

    def take(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Remove the first that is not in `kept`, and return it; None where there is none."""
        passed = []
        found = None
        while self._queue and found is None:
            rank, key = heapq.heappop(self._queue)
            if self._rank.get(key) != rank:
                continue
            if key in kept:
                passed.append((rank, key))
            else:
                found = key
                del self._rank[key]
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return found

    def remove(self, key: ExpertKey) -> None:
        """Remove an expert."""
        del self._rank[key]


class LeastFrequentlyUsed:
    """LFU: gives up the expert that was used in the fewest steps, of several the one of LRU.

    Uses are counted from the first, also while an expert is not held: else what comes back would
    begin again, and be given up next.
    """

    def __init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._clock = 0
        self._held = Ranking()

    def begin(self, layer: int) -> None:
        """Nothing: all steps are alike."""

    def use(self, key: ExpertKey) -> None:
        """Note a use."""
        self._clock += 1
        self._uses[key] += 1
        self._held.put(key, (self._uses[key], self._clock))

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

    def begin(self, layer: int) -> None:
        """Note a step; what the layer's step before used is stale until it is used again."""
        self._stale.update(self._fresh.pop(layer, {}))

    def use(self, key: ExpertKey) -> None:
        """Note a use."""
        self._stale.pop(key, None)
        self._fresh.setdefault(key.layer, {})[key] = None

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what is stale, or comes up last again."""
        found = next((key for key in self._stale if key not in kept), None)
        if found is not None:
            del self._stale[found]
            return found
        for layer in reversed(self._fresh):
            found = next((key for key in self._fresh[layer] if key not in kept), None)
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
        self._small: OrderedDict[ExpertKey, int] = OrderedDict()
        self._main: OrderedDict[ExpertKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ExpertKey, None] = OrderedDict()

    def begin(self, layer: int) -> None:
        """Nothing: all steps are alike."""

    def use(self, key: ExpertKey) -> None:
        """Note a use: it counts for what is held; what is not comes last."""
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(self._MOST_USES, queue[key] + 1)
                return
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first in its queue and is not to stay."""
        # Each turn lets one go, uses one up or moves one on, so this ends.
        while True:
            held = len(self._small) + len(self._main)
            queues = [self._small, self._main]
            if len(self._small) * self._SMALL_SHARE < held:
                queues.reverse()
            candidates = (key for queue in queues for key in queue if key not in kept)
            found = next(candidates, None)
            if found is None:
                return None
            if found in self._small:
                if self._leaves_small(found):
                    return found
            elif self._leaves_main(found):
                return found

    def _leaves_small(self, key: ExpertKey) -> bool:
        uses = self._small.pop(key)
        if uses > 1:
            self._main[key] = 0
            return False
        self._ghosts[key] = None
        while len(self._ghosts) > len(self._small) + len(self._main):
            self._ghosts.popitem(last=False)
        return True

    def _leaves_main(self, key: ExpertKey) -> bool:
        uses = self._main.pop(key)
        if uses:
            self._main[key] = uses - 1
        return not uses

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        for queue in (self._small, self._main):
            queue.pop(key, None)


class AnyOne:
    """Gives up any expert: what a policy that knows nothing comes to. The same each time."""

    def __init__(self) -> None:
        self._held: list[ExpertKey] = []
        self._place: dict[ExpertKey, int] = {}
        self._random = random.Random(0)

    def begin(self, layer: int) -> None:
        """Nothing: all steps are alike."""

    def use(self, key: ExpertKey) -> None:
        """Note that it is held."""
        if key not in self._place:
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
