"""Reads begun before a router has chosen: what the next layer may choose, while this one computes.

From layer to layer a model changes little of what it hands on, so the next layer's router, given
what this layer's was given, names most of what it will choose.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any, Literal

from moepack.llama_cpp.gates import Gate, find_gate
from moepack.running.expert_store import ExpertStore
from moepack.shape import ModelShape

Prefetching = Literal["auto", "on", "off"]
"""Whether reads are begun ahead: where that was measured to be faster, always, never."""

_TRIED_COUNT, _SETTLED_COUNT = 32, 224
_LEAST_GAIN = 0.02


def reserve_length(shape: ModelShape) -> int:
    """Return the bytes that one layer's guesses take: as many experts as a token uses there."""
    return max(
        (family.expert_length * (family.experts_used or 0) for family in shape.routed.values()),
        default=0,
    )


class Prefetch:
    """Tells `store` what to expect of each next layer, while tokens are computed one by one."""

    def __init__(
        self, library: Any, shape: ModelShape, store: ExpertStore, wanted: Prefetching
    ) -> None:
        self._library = library
        self._store = store
        self._used = {layer: family.experts_used or 0 for layer, family in shape.routed.items()}
        self._next = dict(pairwise(shape.routed))
        self._gates: dict[int, Gate] = {}
        self._trial = _Trial() if wanted == "auto" else None
        self._is_on = True

    def passed(self, layer: int, topk: int) -> None:
        """Expect what comes after a layer whose router has chosen for one token."""
        if not self._is_on:
            return
        gate = find_gate(self._library, topk)
        if gate is None:
            return
        self._gates[layer] = gate
        following = self._next.get(layer)
        known = self._gates.get(following) if following is not None else None
        if following is not None and known is not None:
            self._store.expect(following, known.best(gate.given[0], self._used[following]))

    def computed(self, seconds: float) -> None:
        """Learn how long one token took."""
        if self._trial is not None:
            self._is_on = self._trial.decide(self._is_on, seconds)


class _Trial:
    """Finds out whether tokens come faster with prefetching: tries both in turns now and then."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._settled_count = 0

    def decide(self, was_on: bool, seconds: float) -> bool:
        """Take what a token took; return whether the next is computed with prefetching."""
        if self._settled_count:
            self._settled_count -= 1
            return was_on
        self._seconds[was_on].append(seconds)
        if len(self._seconds[True]) + len(self._seconds[False]) < _TRIED_COUNT:
            return not was_on
        took = {is_on: statistics.median(found) for is_on, found in self._seconds.items()}
        self._seconds = {True: [], False: []}
        self._settled_count = _SETTLED_COUNT
        return took[True] < took[False] * (1 - _LEAST_GAIN)
