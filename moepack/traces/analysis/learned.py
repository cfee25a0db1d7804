"""Counting the selections of runs, and the verdict of the concentration gate on them.

Selections are counted as they come, with the hit rate of LRU caches, since their order is not kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepack.common.shape import ExpertKey
from moepack.traces.analysis.gate import (
    CLEAR,
    GATE_PERCENT,
    Division,
    LayerCounts,
    explain,
    judge,
    top_counts,
)
from moepack.traces.caching.cache import SimulatedCache, Tally
from moepack.traces.caching.policies import LeastRecentlyUsed
from moepack.traces.hotness.learned import LEAST_TOKENS, Learned, LearnedWindow

_SECONDS_A_DAY = 86_400
_LEAST_SELECTIONS = 1
"""Of an expert in the smaller half, to prefetch it: that costs little, unlike pinning."""


class LearnedVerdict(NamedTuple):
    """The worth of learned counts: `verdict` and `reason` are those of the concentration gate.

    `is_warming` is whether the most used experts are worth prefetching: they cover more of the
    later half than chance explains.
    """

    verdict: str
    reason: str
    is_warming: bool


def judge_learned(learned: Learned) -> LearnedVerdict:
    """Judge the earlier half by the later one, as `concentration` does."""
    halves = learned.halves()
    evidence = None
    if halves is not None:
        counts = learned.counts, halves[0].counts, halves[1].counts
        layers = []
        for layer, size in learned.expert_counts.items():
            keys = [ExpertKey(layer, expert) for expert in range(size)]
            rows = (np.array([one[key] for key in keys], np.int64) for one in counts)
            layers.append(LayerCounts(layer, *rows))
        evidence = Division(layers, *(half.token_count for half in halves)).evidence()
    is_warming = (
        evidence is not None
        and evidence.selections_per_expert >= _LEAST_SELECTIONS
        and evidence.share > evidence.uniform_share + CLEAR
    )
    reason = explain(evidence, learned.hit_rate)
    return LearnedVerdict(judge(evidence, learned.hit_rate), reason, is_warming)


class UseCounter:
    """Counts selections as they come; `learned` has those of earlier runs.

    It also follows LRU caches of a quarter of each layer, which begin with the most used experts;
    lookups count once a cache is full.
    """

    def __init__(self, learned: Learned) -> None:
        self._windows: list[LearnedWindow] = []
        self._counts: Counter[ExpertKey] = Counter()
        self._token_counts: dict[int, int] = {}
        self._tally = Tally()
        """Of the lookups since the window began."""
        tops = top_counts(learned.expert_counts.values(), GATE_PERCENT)
        self._keys: dict[int, list[ExpertKey]] = {}
        self._caches: dict[int, SimulatedCache] = {}
        for (layer, size), top in zip(learned.expert_counts.items(), tops, strict=True):
            keys = self._keys[layer] = [ExpertKey(layer, expert) for expert in range(size)]
            lengths = dict.fromkeys(keys, 1)
            self._caches[layer] = SimulatedCache(top, lengths, LeastRecentlyUsed())
        for key in reversed(learned.hottest_first()):
            self._caches[key.layer].step([key], Tally())

    def add(self, layer: int, token_count: int, experts: Sequence[int]) -> None:
        """Count the routing of a layer: for each of `token_count` tokens as many experts, in turn.

        Experts that the model does not have, from another one in the program, are left out.
        """
        used = len(experts) // max(1, token_count)
        keys = self._keys.get(layer, [])
        if not used or max(experts) >= len(keys):
            return
        if self._token_counts.get(layer, 0) >= LEAST_TOKENS:
            self._end_window()
        routed = [keys[expert] for expert in experts]
        self._counts.update(routed)
        self._token_counts[layer] = self._token_counts.get(layer, 0) + token_count
        cache = self._caches[layer]
        if used <= cache.budget:
            for start in range(0, len(routed), used):
                is_full = len(cache) == cache.budget
                cache.step(routed[start : start + used], self._tally if is_full else Tally())

    def pop_windows(self, *, is_last: bool = False) -> list[LearnedWindow]:
        """Return the windows since the last call; if `is_last`, the unfinished one too."""
        if is_last and self._token_counts:
            self._end_window()
        windows, self._windows = self._windows, []
        return windows

    def _end_window(self) -> None:
        day, tally = int(time.time() // _SECONDS_A_DAY), self._tally
        lookup_count = tally.hit_count + tally.miss_count
        token_count = max(self._token_counts.values())
        window = LearnedWindow(day, token_count, lookup_count, tally.hit_count, self._counts)
        self._windows.append(window)
        self._counts, self._token_counts, self._tally = Counter(), {}, Tally()
