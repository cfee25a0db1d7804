"""Steps of many tokens: they use most experts of a layer, and need them no more after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from moepack.keys import ExpertKey
from moepack.pager.residents import Residents

MANY = 64
"""Tokens of a step from which on the next layer is read ahead."""
_MOST_UNUSED = 0.05
"""Of what a layer uses, what may be read for it in vain."""


class Prompts:
    """Has the experts of prompts come and go beside those that single tokens made resident.

    While a layer computes the next one is read, in the order of the file, where there is room for
    two. What a prompt brought makes room first, what it used least before all; what is left when it
    has ended stays.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._layers: dict[int, list[ExpertKey]] = {}
        for key in residents.spans:
            self._layers.setdefault(key.layer, []).append(key)
        self._numbers = sorted(self._layers)
        self._longest = max(map(residents.length_of, self._layers.values()))
        self._brought: dict[ExpertKey, int] = {}
        """What prompts brought, and how many tokens chose it."""

    def begin_step(self, keys: Sequence[ExpertKey], token_count: int) -> None:
        """Make room for what a layer chose, before it is looked up."""
        residents = self._residents
        if token_count < MANY:
            if self._brought:
                self._brought.clear()
                residents.lend(0)
            return
        residents.lend(0)
        counts = Counter(keys)
        missing = [key for key in counts if not residents.is_cached(key)]
        self._make_room(residents.length_of(missing), counts.keys())
        self._brought.update((key, counts[key]) for key in missing)

    def _make_room(self, length: int, kept: Container[ExpertKey]) -> None:
        """Let go of what prompts brought until so many bytes are free."""
        lacking = length - self._residents.free_length
        dropped: list[ExpertKey] = []
        for key in sorted(self._brought, key=self._brought.__getitem__):
            if lacking <= 0:
                break
            if key not in kept:
                dropped.append(key)
                lacking -= self._residents.length_of([key])
        for key in dropped:
            del self._brought[key]
        self._residents.set_aside(dropped)

    def expect(self, keys: Sequence[ExpertKey], token_count: int) -> list[ExpertKey]:
        """Return what the next layer may choose and lacks; there is room for it then."""
        if token_count < MANY or self._residents.budget < 2 * self._longest:
            return []
        layer, chosen = keys[0].layer, set(keys)
        following = self._numbers.index(layer) + 1
        if following == len(self._numbers):
            return []
        self._make_room(self._longest, chosen)
        self._residents.lend(self._longest)
        return list(self._likely(self._numbers[following], len(chosen) / len(self._layers[layer])))

    def _likely(self, layer: int, share: float) -> Iterator[ExpertKey]:
        """Yield experts of a layer, of which about such a share will be chosen."""
        lacking = [key for key in self._layers[layer] if key not in self._residents]
        most = len(lacking)
        if share < 1:
            wasted = _MOST_UNUSED * share * len(self._layers[layer])
            most = min(most, int(wasted / (1 - share)))
        yield from lacking[:most]
