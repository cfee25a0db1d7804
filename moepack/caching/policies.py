"""Which expert a cache gives up first. A policy knows no bytes: it orders what is held."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Container
from typing import Protocol

from moepack.keys import ExpertKey


class Policy(Protocol):
    """Orders the experts that are held, and no others."""

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


class LeastFrequentlyUsed:
    """LFU: gives up the expert that was used in the fewest steps, of several the one of LRU.

    Uses are counted from the first, also while an expert is not held: else what comes back would
    begin again, and be given up next.
    """

    def __init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._last_use: dict[ExpertKey, int] = {}
        self._clock = 0
        # What is held, by uses and last use. An entry that is out of date is left out when it comes
        # up; so many of them at most, that each use costs no more than its own.
        self._queue: list[tuple[int, int, ExpertKey]] = []

    def use(self, key: ExpertKey) -> None:
        """Note a use."""
        self._clock += 1
        self._uses[key] += 1
        self._last_use[key] = self._clock
        heapq.heappush(self._queue, (self._uses[key], self._clock, key))
        if len(self._queue) > 64 + 4 * len(self._last_use):
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapq.heapify(self._queue)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what comes first."""
        passed: list[tuple[int, int, ExpertKey]] = []
        found = None
        while self._queue and found is None:
            entry = heapq.heappop(self._queue)
            if not self._is_current(entry):
                continue
            if entry[2] in kept:
                passed.append(entry)
            else:
                found = entry[2]
                del self._last_use[found]
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return found

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        del self._last_use[key]

    def _is_current(self, entry: tuple[int, int, ExpertKey]) -> bool:
        return self._last_use.get(entry[2]) == entry[1]
