"""LRU at all budgets, from one pass: of one cache, of one a layer, and with an even router."""

from collections.abc import Mapping

import numpy as np

from moepack.shape import FamilyShape
from moepack.simulation.curve import Curve
from moepack.simulation.even import EvenRouter
from moepack.simulation.lookups import Lookups
from moepack.simulation.stack import LruStack
from moepack.trace.expert_places import padded
from moepack.trace.model import Ints
from moepack.trace.steps import Truths


class PhaseCurves:
    """The curve of what is decoded, and that of prefill."""

    def __init__(self) -> None:
        self.decode, self.prefill = Curve(), Curve()

    def add(self, lookups: Lookups, needs: Ints, lengths: Ints) -> None:
        """Take lookups with their needs, and the bytes of their experts."""
        for curve, chosen in ((self.decode, lookups.is_decode), (self.prefill, ~lookups.is_decode)):
            curve.add(needs[chosen], lengths[chosen])


class LruCurves:
    """Curves of caches of the experts that the routers of `routed` layers choose from.

    `whole` is by the bytes of one cache, and `even` is, with a router that looks up as many experts
    in each step, all alike. `by_layer` are by the experts in a cache of one layer, for each length
    that experts have: all layers' together. `shared` is of what decode looks up and another request
    used last, by the bytes of one cache.
    """

    def __init__(self, routed: Mapping[int, FamilyShape]) -> None:
        layer_count = max(routed) + 1
        self._lengths = np.zeros(layer_count, np.int64)
        expert_counts = np.zeros(layer_count, np.int64)
        for layer, family in routed.items():
            self._lengths[layer] = family.expert_length
            expert_counts[layer] = family.expert_count
        self._even_router = EvenRouter(expert_counts)
        self.whole, self.even = PhaseCurves(), PhaseCurves()
        used = {family.expert_length for family in routed.values()}
        self.by_layer = {length: PhaseCurves() for length in sorted(used)}
        self.shared = Curve()
        self._stacks = LruStack(), LruStack(), LruStack()
        self._last_requests = _LastRequests()

    def add(self, lookups: Lookups) -> None:
        """Take the next lookups."""
        lengths = self._lengths[lookups.layer]
        whole, even, by_layer = self._stacks
        zeros, ones = (
            np.zeros(lookups.lookup_count, np.int64),
            np.ones(lookups.lookup_count, np.int64),
        )
        needs = whole.needs(zeros, lookups.place, lengths, lookups.step)
        self.whole.add(lookups, needs, lengths)
        is_shared = self._last_requests.are_others(lookups) & lookups.is_decode
        self.shared.add(needs[is_shared], lengths[is_shared])
        needs = even.needs(zeros, self._even_router.places(lookups), lengths, lookups.step)
        self.even.add(lookups, needs, lengths)
        needs = by_layer.needs(lookups.layer, lookups.place, ones, lookups.step)
        for length, curves in self.by_layer.items():
            chosen = lengths == length
            curves.add(lookups.part(chosen), needs[chosen], lengths[chosen])


class _LastRequests:
    """Remembers which request used each expert last."""

    _NONE = -1

    def __init__(self) -> None:
        self._by_place = np.zeros(0, np.int64)

    def are_others(self, lookups: Lookups) -> Truths:
        """Say of each lookup whether another request used its expert last."""
        place, request = lookups.place, lookups.request
        self._by_place = padded(self._by_place, int(place.max()) + 1, self._NONE)
        order = np.argsort(place, kind="stable")
        is_first = np.diff(place[order], prepend=-1) != 0
        before = np.empty(len(place), np.int64)
        before[order[1:]] = request[order[:-1]]
        before[order[is_first]] = self._by_place[place[order[is_first]]]
        self._by_place[place[order]] = request[order]  # the last one stays
        others: Truths = (before != request) & (before != self._NONE)
        return others
