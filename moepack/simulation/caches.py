"""The caches that are simulated: from curves, by replays, or by counting what is held for good."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import numpy as np

from moepack.caching import cache as caching
from moepack.caching.cache import Cache, ExpertCache, Tally
from moepack.keys import ExpertKey
from moepack.shape import ModelShape
from moepack.simulation import static
from moepack.simulation.clairvoyant import Belady, NextUses
from moepack.simulation.facts import CacheFacts, PrefetchFacts
from moepack.simulation.guesses import guess
from moepack.simulation.lookups import LookupStream
from moepack.simulation.one_pass import OnePass
from moepack.simulation.replay import replay
from moepack.simulation.spool import Spool
from moepack.trace.model import Ints

BELADY, STATIC, PROMPT_STATIC = "belady", "static", "static-prompt"
_LRU, _LAYER, _SLOTS = "lru", "layer", "slots"


class Caches:
    """Says what caches would have done with what one pass kept of a trace.

    `in_order` has the lookups request after request, also where sessions take turns.
    """

    def __init__(
        self,
        shape: ModelShape,
        one_pass: OnePass,
        stream: LookupStream,
        in_order: Spool,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self._routed = shape.routed
        self._progress = progress or (lambda: None)
        self._pass = one_pass
        self._stream = stream
        self._in_order = in_order
        self._expert_length = shape.routed_length

    def of(self, policy: str, budgets: Sequence[int]) -> list[CacheFacts]:
        """Return what caches of a policy would have done, one for each budget."""
        if policy in (STATIC, PROMPT_STATIC):
            return self._of_static(policy, budgets)
        if policy == BELADY:
            return self._belady(budgets)
        facts = []
        for budget in budgets:
            facts.append(self._online(policy, budget))
            self._progress()
        return facts

    def _of_static(self, policy: str, budgets: Sequence[int]) -> list[CacheFacts]:
        if policy == STATIC:
            token_count = self._stream.decode_token_count
            tallies = static.held_out(self._pass.spool, self._lengths, budgets, token_count)
            token_count -= token_count // 2
        else:
            tallies, token_count = static.prompt_alone(self._in_order, self._lengths, budgets)
        for _ in budgets:
            self._progress()
        return self._static(policy, budgets, tallies, token_count)

    def prefetches(self, count: int, budgets: Sequence[int]) -> list[PrefetchFacts]:
        """Return what guessing `count` experts ahead would have done under LRU."""
        token_count = self._stream.decode_token_count
        facts = []
        for budget in budgets:
            cache = caching.make(_LRU, budget, self._key_lengths)
            found = guess(self._pass.spool, self._keys, cache, self._key_lengths, count)
            facts.append(
                PrefetchFacts(
                    budget_length=budget,
                    guessed_count=count,
                    useful_share=_ratio(found.useful_count, found.miss_count),
                    useful_bytes_per_token=_ratio(found.useful_length, token_count),
                    wasted_bytes_per_token=_ratio(found.wasted_length, token_count),
                )
            )
            self._progress()
        return facts

    def of_slots(self, count: int) -> CacheFacts:
        """Return what LRU caches of so many experts of each layer would have done."""
        found = [
            (curves.prefill.tally(count), curves.decode.tally(count))
            for curves in self._pass.curves.by_layer.values()
        ]
        length = sum(min(count, f.expert_count) * f.expert_length for f in self._routed.values())
        prefill, decode = (_sum(tallies) for tallies in zip(*found, strict=True))
        return self._facts(_SLOTS, length, prefill, decode, slots=count)

    def _online(self, policy: str, budget: int) -> CacheFacts:
        curves = self._pass.curves
        if policy == _LRU:
            found = curves.whole.prefill.tally(budget), curves.whole.decode.tally(budget)
        elif policy == _LAYER:
            share = budget // len(self._routed)
            by_layer = curves.by_layer.items()
            found = (
                _sum(layer.prefill.tally(share // length) for length, layer in by_layer),
                _sum(layer.decode.tally(share // length) for length, layer in by_layer),
            )
        else:
            found = self._replay(caching.make(policy, budget, self._key_lengths))
        return self._facts(policy, budget, *found)

    def _belady(self, budgets: Sequence[int]) -> list[CacheFacts]:
        facts = []
        with NextUses(self._pass.spool, len(self._keys)) as following:
            for budget in budgets:
                policy = partial(Belady, iter(following))
                found = self._replay(ExpertCache(budget, self._key_lengths, policy))
                facts.append(self._facts(BELADY, budget, *found))
                self._progress()
        return facts

    def _replay(self, cache: Cache) -> tuple[Tally, Tally]:
        return replay(self._pass.spool, self._keys, cache)

    def _facts(
        self, policy: str, budget: int, prefill: Tally, decode: Tally, slots: int | None = None
    ) -> CacheFacts:
        curve = self._pass.curves.whole.decode
        warm_count = curve.count - curve.cold_count
        token_count = self._stream.decode_token_count
        return CacheFacts(
            policy=policy,
            budget_length=budget,
            budget_share=budget / self._expert_length,
            slots=slots,
            decode_hit_rate=decode.hit_rate,
            warm_hit_rate=_ratio(decode.hit_count, warm_count),
            hit_rate=_sum((prefill, decode)).hit_rate,
            bytes_per_token=_ratio(decode.missed_length, token_count),
            read_length=prefill.missed_length + decode.missed_length,
        )

    def _static(
        self, policy: str, budgets: Sequence[int], tallies: Iterable[Tally], token_count: int
    ) -> list[CacheFacts]:
        return [
            CacheFacts(
                policy=policy,
                budget_length=budget,
                budget_share=budget / self._expert_length,
                slots=None,
                decode_hit_rate=tally.hit_rate,
                warm_hit_rate=None,
                hit_rate=None,
                bytes_per_token=_ratio(tally.missed_length, token_count),
                read_length=None,
            )
            for budget, tally in zip(budgets, tallies, strict=True)
        ]

    @cached_property
    def _keys(self) -> list[ExpertKey]:
        """The experts by place."""
        places = self._stream.places
        numbers = (column.tolist() for column in places.keys(np.arange(places.count)))
        known = {key: key for key in self._key_lengths}  # one that is the same is found faster
        keys = (ExpertKey(*key) for key in zip(*numbers, strict=True))
        return [known.get(key, key) for key in keys]

    @cached_property
    def _key_lengths(self) -> dict[ExpertKey, int]:
        return {
            ExpertKey(layer, expert): family.expert_length
            for layer, family in self._routed.items()
            for expert in range(family.expert_count)
        }

    @cached_property
    def _lengths(self) -> Ints:
        """The bytes of experts by place; 0 where there is none."""
        return np.array([self._key_lengths.get(key, 0) for key in self._keys], np.int64)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.hit_count += tally.hit_count
        total.miss_count += tally.miss_count
        total.missed_length += tally.missed_length
    return total
