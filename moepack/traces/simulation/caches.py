"""The simulated caches: from miss-ratio curves, by replays, or with experts held for good."""

import heapq
import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from moepack.common.shape import ExpertKey, ModelShape
from moepack.traces.caching import cache as caching
from moepack.traces.caching.cache import SimulatedCache, Tally
from moepack.traces.expert_places import values_before
from moepack.traces.hotness.counter import hottest_within
from moepack.traces.model import Ints
from moepack.traces.simulation.curves import LruCurves
from moepack.traces.simulation.facts import CacheFacts
from moepack.traces.simulation.lookups import Lookups, LookupStream
from moepack.traces.spool import Arrays, Spool

BELADY, STATIC = "belady", "static"
_LRU = "lru"


class Caches:
    """Evaluates caches on the lookups of a trace, by their `curves` and the lookups in `spool`."""

    def __init__(
        self, shape: ModelShape, stream: LookupStream, curves: LruCurves, spool: Spool
    ) -> None:
        self._routed = shape.routed
        self._expert_length = shape.routed_length
        self.stream, self.curves = stream, curves
        self._places, self._token_count = stream.places, stream.decode_token_count
        self._spool = spool

    def evaluate(self, policy: str, budgets: Sequence[int]) -> Iterator[CacheFacts]:
        """Yield the results of a policy, one for each budget."""
        if policy == STATIC:
            yield from self._static(budgets)
        elif policy == BELADY:
            yield from self._belady(budgets)
        else:
            for budget in budgets:
                if policy == _LRU:
                    whole = self.curves.whole
                    tallies = whole.prefill.tally(budget), whole.decode.tally(budget)
                else:
                    cache = caching.make(policy, budget, self._key_lengths)
                    tallies = replay(self._spool, self._keys, cache)
                yield self._facts(policy, budget, *tallies)

    def _belady(self, budgets: Sequence[int]) -> Iterator[CacheFacts]:
        with Spool() as next_uses:
            add_next_uses(self._spool, len(self._keys), next_uses)
            for budget in budgets:
                policy = Belady(reversed(next_uses))
                cache = SimulatedCache(budget, self._key_lengths, policy)
                yield self._facts(BELADY, budget, *replay(self._spool, self._keys, cache))

    def _static(self, budgets: Sequence[int]) -> Iterator[CacheFacts]:
        """Yield the hits of the hottest experts of the first half of decoding, on the second."""
        half = self._token_count // 2
        lengths = np.array([self._key_lengths.get(key, 0) for key in self._keys], np.int64)
        learned, measured = _decode_halves(self._spool, len(lengths), half)
        for budget in budgets:
            is_hot = hottest_within(learned, lengths, budget)
            missed = np.where(is_hot, 0, measured)
            hit_count, miss_count = int(measured[is_hot].sum()), int(missed.sum())
            tally = Tally(hit_count, miss_count, int((missed * lengths).sum()))
            yield self._facts(STATIC, budget, None, tally, token_count=self._token_count - half)

    def _facts(
        self,
        policy: str,
        budget: int,
        prefill: Tally | None,
        decode: Tally,
        *,
        token_count: int | None = None,
    ) -> CacheFacts:
        """Return the facts of a cache; those of a part of the trace have no `prefill`."""
        hit_rate = read_length = warm_hit_rate = None
        if prefill is not None:
            curve = self.curves.whole.decode
            warm_hit_rate = _ratio(decode.hit_count, curve.count - curve.cold_count)
            read_length = prefill.missed_length + decode.missed_length
            hit_count = prefill.hit_count + decode.hit_count
            hit_rate = _ratio(hit_count, hit_count + prefill.miss_count + decode.miss_count)
        return CacheFacts(
            policy=policy,
            budget_length=budget,
            budget_share=budget / self._expert_length,
            decode_hit_rate=decode.hit_rate,
            warm_hit_rate=warm_hit_rate,
            hit_rate=hit_rate,
            bytes_per_token=_ratio(
                decode.missed_length, self._token_count if token_count is None else token_count
            ),
            read_length=read_length,
        )

    @cached_property
    def _keys(self) -> list[ExpertKey]:
        """The experts by place."""
        numbers = (column.tolist() for column in self._places.keys(np.arange(self._places.count)))
        shared = {key: key for key in self._key_lengths}  # a dict finds the same object faster
        keys = (ExpertKey(*key) for key in zip(*numbers, strict=True))
        return [shared.get(key, key) for key in keys]

    @cached_property
    def _key_lengths(self) -> dict[ExpertKey, int]:
        return {
            ExpertKey(layer, expert): family.expert_length
            for layer, family in self._routed.items()
            for expert in range(family.expert_count)
        }


def _decode_halves(spool: Spool, place_count: int, half: int) -> tuple[Ints, Ints]:
    """Return the selections of each expert by place: of the first `half` decoded tokens, and later.

    A decoded token is a call, so each of its lookups is one selection.
    """
    counts = np.zeros((2, place_count), np.int64)
    done, last = 0, -1
    for lookups in map(Lookups._make, spool):
        decoded = lookups.part(lookups.is_decode)
        number = done + np.cumsum(np.diff(decoded.call, prepend=last) != 0)
        if decoded.lookup_count:
            done, last = int(number[-1]), int(decoded.call[-1])
        np.add.at(counts, ((number > half).astype(np.int64), decoded.place), 1)
    return counts[0], counts[1]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


NEVER = int(np.iinfo(np.int64).max)


def replay(spool: Spool, keys: Sequence[ExpertKey], cache: SimulatedCache) -> tuple[Tally, Tally]:
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


class Belady:
    """Belady's policy: evict the expert with the furthest next use.

    If all experts have one length, no cache that reads experts on demand hits more. `next_uses` are
    the arrays of `add_next_uses`, the last one first.
    """

    def __init__(self, next_uses: Iterable[Arrays]) -> None:
        steps = chain.from_iterable(array.tolist() for (array,) in next_uses)
        self._next_ranks = map(operator.neg, steps)
        self._ranks: dict[ExpertKey, int] = {}
        """Of resident experts, the furthest next use first."""
        self._queue: list[tuple[int, ExpertKey]] = []
        """Ranks with their experts, outdated ones among them."""

    def record(self, layer: int, keys: Sequence[ExpertKey], misses: Sequence[ExpertKey]) -> None:
        """Rank a step's experts by their next uses."""
        for key, rank in zip(keys, self._next_ranks, strict=False):
            self._ranks[key] = rank
            heapq.heappush(self._queue, (rank, key))
        if len(self._queue) > 64 + 4 * len(self._ranks):
            self._queue = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._queue)

    def evict(self, kept: Container[ExpertKey]) -> ExpertKey | None:
        """Evict the first that is not in `kept`."""
        evicted: ExpertKey | None = None
        passed: list[tuple[int, ExpertKey]] = []
        while self._queue and evicted is None:
            rank, key = heapq.heappop(self._queue)
            if self._ranks.get(key) != rank:
                continue
            if key in kept:
                passed.append((rank, key))
            else:
                evicted = key
                del self._ranks[key]
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return evicted


def add_next_uses(lookups: Spool, place_count: int, backwards: Spool) -> None:
    """Add to `backwards` the step of each lookup's next use, NEVER for none; the last group first.

    It has one array for each group of `lookups`.
    """
    following = np.full(place_count, NEVER, np.int64)
    for group in map(Lookups._make, reversed(lookups)):
        next_steps = values_before(group.step[::-1], group.place[::-1], following)
        backwards.add((next_steps[::-1],))
