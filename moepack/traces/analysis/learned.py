"""Counting the selections of runs, and the verdict of the concentration gate on them.

Selections are counted as they come, with the hit rate of LRU caches, since their order is not kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepack.traces.analysis.division import Division, LayerCounts, top_counts
from moepack.traces.analysis.verdict import CLEAR, GATE_PERCENT, explain, judge
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

    @property
    def is_pinning(self) -> bool:
        """Whether the most used experts are worth pinning."""
        return self.verdict == "static"


def judge_learned(learned: Learned) -> LearnedVerdict:
    """Judge the earlier half by the later one, as `concentration` does."""
    halves = learned.halves()
    evidence = None
    if halves is not None:
        earlier, later = halves
        borders = np.cumsum([*learned.expert_counts.values()])[:-1]
        columns = [np.split(one.counts, borders) for one in (learned, earlier, later)]
        layers = list(map(LayerCounts, learned.expert_counts, *columns))
        evidence = Division(layers, earlier.token_count, later.token_count).evidence()
    is_warming = (
        evidence is not None
        and evidence.selections_per_expert >= _LEAST_SELECTIONS
        and evidence.share > evidence.uniform_share + CLEAR
    )
    reason = explain(evidence, None, learned.hit_rate)
    return LearnedVerdict(judge(evidence, learned.hit_rate), reason, is_warming)


class UseCounter:
    """Counts selections as they come; `learned` has those of earlier runs.

    It also follows LRU caches of a quarter of each layer, which begin with the most used experts;
    lookups count once a cache is full.
    """

    def __init__(self, learned: Learned) -> None:
        self._expert_counts = learned.expert_counts
        self._windows: list[LearnedWindow] = []
        self._chosen: dict[int, list[int]] = {layer: [] for layer in learned.expert_counts}
        self._token_counts: dict[int, int] = {}
        self._lookup_count = self._hit_count = 0
        tops = top_counts(learned.expert_counts.values(), GATE_PERCENT)
        self._capacities = dict(zip(learned.expert_counts, tops, strict=True))
        self._latest: dict[int, OrderedDict[int, None]] = {
            layer: OrderedDict() for layer in learned.expert_counts
        }
        for layer, expert in reversed(learned.hottest_first()):
            self._latest[layer][expert] = None
        for layer, latest in self._latest.items():
            while len(latest) > self._capacities[layer]:
                latest.popitem(last=False)

    def add(self, layer: int, token_count: int, experts: Sequence[int]) -> None:
        """Count the routing of a layer: for each of `token_count` tokens as many experts, in turn.

        Experts that the model does not have, from another one in the program, are left out.
        """
        used = len(experts) // max(1, token_count)
        if not used or max(experts) >= self._expert_counts.get(layer, 0):
            return
        if self._token_counts.get(layer, 0) >= LEAST_TOKENS:
            self._end_window()
        self._chosen[layer] += experts
        self._token_counts[layer] = self._token_counts.get(layer, 0) + token_count
        if used <= self._capacities[layer]:
            for start in range(0, len(experts), used):
                self._look_up(layer, experts[start : start + used])

    def _look_up(self, layer: int, experts: Sequence[int]) -> None:
        latest, capacity = self._latest[layer], self._capacities[layer]
        is_full = len(latest) >= capacity
        for expert in experts:
            if expert in latest:
                latest.move_to_end(expert)
                self._hit_count += is_full
            else:
                latest[expert] = None
        self._lookup_count += is_full * len(experts)
        while len(latest) > capacity:
            latest.popitem(last=False)

    def pop_windows(self, *, is_last: bool = False) -> list[LearnedWindow]:
        """Return the windows since the last call; if `is_last`, the unfinished one too."""
        if is_last and self._token_counts:
            self._end_window()
        windows, self._windows = self._windows, []
        return windows

    def _end_window(self) -> None:
        layers = self._expert_counts.items()
        counts = [np.bincount(self._chosen[layer], minlength=count) for layer, count in layers]
        self._windows.append(
            LearnedWindow(
                int(time.time() // _SECONDS_A_DAY),
                max(self._token_counts.values()),
                self._lookup_count,
                self._hit_count,
                np.concatenate(counts),
            )
        )
        self._chosen = {layer: [] for layer in self._expert_counts}
        self._token_counts = {}
        self._lookup_count = self._hit_count = 0
