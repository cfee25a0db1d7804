"""Cache policies: the order in which resident experts are evicted. They know no bytes."""

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from moepack.common.shape import ExpertKey


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


def _first(keys: Iterable[ExpertKey], kept: Container[ExpertKey]) -> ExpertKey | None:
    return next((key for key in keys if key not in kept), None)
