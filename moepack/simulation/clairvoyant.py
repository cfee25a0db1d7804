"""Belady's policy: gives up what is needed again last, which only a trace can tell.

Where experts have one length, nothing that reads an expert when it is chosen hits more.
"""

import operator
from collections.abc import Container, Iterator, Sequence
from typing import Self

import numpy as np

from moepack.caching.policies import Ranking
from moepack.keys import ExpertKey
from moepack.simulation.lookups import Lookups
from moepack.simulation.spool import Spool
from moepack.trace.model import Ints

NEVER = int(np.iinfo(np.int64).max)


class Belady:
    """The policy of one replay: `next_uses` are the steps of the next use, one for each use."""

    def __init__(self, next_uses: Iterator[int]) -> None:
        self._next_ranks = map(operator.neg, next_uses)
        self._ranks: dict[ExpertKey, int] = {}
        self._held = Ranking(self._ranks.__getitem__)

    def use(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Note a step's uses, which say when the next ones will be."""
        self._ranks.update(zip(keys, self._next_ranks, strict=False))
        self._held.put(keys)

    def give_up(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Let go of what is needed again last."""
        return self._held.take(kept)

    def forget(self, key: ExpertKey) -> None:
        """Let this expert go."""
        self._held.remove(key)


class NextUses:
    """The steps in which the expert of each lookup is looked up next. A context manager.

    Iterating gives one step for each lookup of the spool, NEVER where there is none.
    """

    def __init__(self, lookups: Spool, place_count: int) -> None:
        self._backwards = Spool()
        following = np.full(place_count, NEVER, np.int64)
        for group in map(Lookups._make, reversed(lookups)):
            self._backwards.add((_next_uses(group, following),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._backwards.__exit__()

    def __iter__(self) -> Iterator[int]:
        for (steps,) in reversed(self._backwards):
            yield from steps.tolist()


def _next_uses(lookups: Lookups, following: Ints) -> Ints:
    """Return the next uses of some lookups; `following` are, by place, those after them."""
    place, step = lookups.place, lookups.step
    order = np.argsort(place, kind="stable")
    is_last = np.append(np.diff(place[order]) != 0, True)
    found = np.empty(len(place), np.int64)
    found[order[:-1]] = step[order[1:]]
    found[order[is_last]] = following[place[order[is_last]]]
    is_first = np.insert(np.diff(place[order]) != 0, 0, True)
    following[place[order[is_first]]] = step[order[is_first]]
    return found
