"""Replays: the lookups of a trace run through one cache, step by step."""

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from moepack.common.shape import ExpertKey
from moepack.traces.caching.cache import ExpertCache, Tally
from moepack.traces.caching.policies import Ranking
from moepack.traces.simulation.lookups import Lookups
from moepack.traces.spool import Arrays, Spool

NEVER = int(np.iinfo(np.int64).max)


def replay(spool: Spool, keys: Sequence[ExpertKey], cache: ExpertCache) -> tuple[Tally, Tally]:
    """Run all lookups of a spool through a cache; return the tallies of prefill and of decode.

    `keys` are the experts by place.
    """
    tallies = Tally(), Tally()
    for is_decode, routed in _steps(spool, keys):
        cache.step(routed, tallies[is_decode])
    return tallies


def _steps(spool: Spool, keys: Sequence[ExpertKey]) -> Iterator[tuple[bool, list[ExpertKey]]]:
    """Yield each step: whether it is decode, and its experts."""
    for lookups in map(Lookups._make, spool):
        routed = [keys[place] for place in lookups.place.tolist()]
        starts = lookups.step_starts
        ends = [*starts[1:].tolist(), lookups.lookup_count]
        is_decode = lookups.is_decode[starts].tolist()
        for start, end, decodes in zip(starts.tolist(), ends, is_decode, strict=True):
            yield decodes, routed[start:end]


def replay_prefetching(
    spool: Spool, keys: Sequence[ExpertKey], cache: ExpertCache, count: int
) -> Iterator[tuple[set[ExpertKey], list[ExpertKey]]]:
    """Replay a spool, and prefetch before each step the `count` experts its layer used last.

    Yield the prefetched experts of each decode step, and its misses. As when a model runs, wrong
    guesses never enter the cache, so hits are the same.
    """
    used: dict[int, OrderedDict[ExpertKey, None]] = {}
    for is_decode, routed in _steps(spool, keys):
        recent = used.setdefault(routed[0].layer, OrderedDict())
        prefetched = {key for key in islice(reversed(recent), count) if key not in cache}
        misses = cache.step(routed, Tally()).misses
        if is_decode:
            yield prefetched, misses
        for key in routed:
            recent[key] = None
            recent.move_to_end(key)


class Belady:
    """Belady's policy: evict the expert with the furthest next use.

    If all experts have one length, no cache that reads experts on demand hits more. `next_uses` are
    the arrays of `add_next_uses`, the last one first.
    """

    def __init__(self, next_uses: Iterable[Arrays]) -> None:
        steps = chain.from_iterable(array.tolist() for (array,) in next_uses)
        self._next_ranks = map(operator.neg, steps)
        self._ranks: dict[ExpertKey, int] = {}
        self._ranking = Ranking(self._ranks.__getitem__)
        self.evict, self.remove = self._ranking.pop, self._ranking.remove

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Rank a step's experts by their next uses."""
        self._ranks.update(zip(keys, self._next_ranks, strict=False))
        self._ranking.put(keys)


def add_next_uses(lookups: Spool, place_count: int, backwards: Spool) -> None:
    """Add to `backwards` the step of each lookup's next use, NEVER for none; the last group first.

    It has one array for each group of `lookups`.
    """
    following = np.full(place_count, NEVER, np.int64)
    for group in map(Lookups._make, reversed(lookups)):
        place, step = group.place, group.step
        order = np.argsort(place, kind="stable")
        changes = np.diff(place[order]) != 0
        last, first = order[np.append(changes, True)], order[np.insert(changes, 0, True)]
        next_step = np.empty(len(place), np.int64)
        next_step[order[:-1]] = step[order[1:]]
        next_step[last] = following[place[last]]
        following[place[first]] = step[first]
        backwards.add((next_step,))
