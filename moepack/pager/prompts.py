"""Steps of many tokens: they use most experts of a layer, and need them no more after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from moepack.keys import ExpertKey
from moepack.pager.residents import Residents
from moepack.pager.routing_history import RoutingHistory

MANY = 64
"""Tokens of a step from which on the next layer is read ahead."""
_MOST_UNUSED = 0.05
"""Of what a layer uses, what may be read for it in vain."""


class Prompts:
    """Has the experts of prompts come and go, and the ones that routers choose most often stay.

    While a layer computes the next one is read, in the order of the file, as far as it is likely
    chosen and there is room. Least recently used is what comes next, where one layer follows the
    other: what makes room is what was chosen least often instead. By `position` experts are in the
    order of their files.
    """

    def __init__(
        self, residents: Residents, position: Callable[[ExpertKey], tuple[object, ...]]
    ) -> None:
        self._residents = residents
        self._position = position
        counts = Counter(key.layer for key in residents.spans)
        self._numbers = sorted(counts)
        self._places = {layer: place for place, layer in enumerate(self._numbers)}
        self._history = RoutingHistory(counts)

    def begin_step(self, layer: int, choices: Counter[int], token_count: int) -> None:
        """Make room for what a layer chose, before it is looked up."""
        self._residents.lend(0)
        if token_count < MANY:
            self._history.add(layer, choices, token_count)
        else:
            keys = [ExpertKey(layer, expert) for expert in choices]
            missing = [key for key in keys if not self._residents.is_cached(key)]
            self._make_room(self._residents.length_of(missing), layer, frozenset(keys))

    def _make_room(self, length: int, layer: int, kept: Container[ExpertKey]) -> None:
        """Evict what is chosen least often until so many bytes are free.

        Among those that are chosen alike, the layers behind `layer` come first: of all they are
        computed last.
        """
        lacking = length - self._residents.free_length
        if lacking <= 0:
            return
        places = self._places
        evicted: list[ExpertKey] = []

        def value(key: ExpertKey) -> tuple[float, int]:
            return self._history.share(key), (places[layer] - places[key.layer]) % len(places)

        for key in sorted(self._residents.evictable(), key=value):
            if lacking <= 0:
                break
            if key not in kept:
                evicted.append(key)
                lacking -= self._residents.length_of([key])
        self._residents.set_aside(evicted)

    def expect(self, layer: int, choices: Counter[int], token_count: int) -> list[ExpertKey]:
        """Return what the next layer likely chooses and lacks, having made room for it."""
        chosen = frozenset(ExpertKey(layer, expert) for expert in choices)
        expected: list[ExpertKey] = []
        following = self._places[layer] + 1
        if following < len(self._numbers):
            likelihoods = self._history.likelihoods(
                layer, choices, token_count, self._numbers[following]
            )
            room = self._residents.free_length
            room += self._residents.length_of(set(self._residents.evictable()) - chosen)
            expected = self._likely(self._numbers[following], likelihoods, room)
        self._history.add(layer, choices, token_count)
        length = self._residents.length_of(expected)
        self._make_room(length, layer, chosen)
        self._residents.lend(length)
        return sorted(expected, key=self._position)

    def _likely(self, layer: int, likelihoods: list[float], room: int) -> list[ExpertKey]:
        """Return experts of a layer that are lacking: the likeliest, up to `room` bytes.

        What is read in vain is expected to be a small share of what will be used.
        """
        unused = _MOST_UNUSED * sum(likelihoods)
        likely: list[ExpertKey] = []
        for expert in sorted(range(len(likelihoods)), key=lambda one: -likelihoods[one]):
            key = ExpertKey(layer, expert)
            if key in self._residents:
                continue
            unused -= 1 - likelihoods[expert]
            room -= self._residents.length_of([key])
            if unused < 0 or room < 0:
                break
            likely.append(key)
        return likely
