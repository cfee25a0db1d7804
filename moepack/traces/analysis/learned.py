"""Counting the selections of runs, and the verdict of the concentration gate on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moepack.common.shape import ExpertKey
from moepack.traces.analysis.gate import CLEAR, Division, LayerCounts, explain, judge
from moepack.traces.hotness.learned import LEAST_TOKENS, Learned, LearnedWindow

_SECONDS_A_DAY = 86_400
_LEAST_SELECTIONS = 1
"""Of an expert in the smaller half, to prefetch it: that costs little, unlike pinning."""


class LearnedVerdict(NamedTuple):
    """The worth of learned counts: `verdict` and `reason` are those of the concentration gate.

    Without the order of tokens they say nothing of recency. `is_warming` is whether the most used
    experts are worth prefetching: they cover more of the later half than chance explains.
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
    return LearnedVerdict(judge(evidence, None), explain(evidence, None), is_warming)


class UseCounter:
    """Counts selections as they come; `expert_counts` are the model's, by layer."""

    def __init__(self, expert_counts: Mapping[int, int]) -> None:
        self._expert_counts = expert_counts
        self._windows: list[LearnedWindow] = []
        self._counts: dict[int, Counter[int]] = {}
        """Of each expert, by layer."""
        self._token_counts: dict[int, int] = {}

    def add(self, layer: int, token_count: int, experts: Sequence[int]) -> None:
        """Count the routing of a layer: for each of `token_count` tokens as many experts, in turn.

        Experts that the model does not have, from another one in the program, are left out.
        """
        if not token_count or not experts or max(experts) >= self._expert_counts.get(layer, 0):
            return
        if self._token_counts.get(layer, 0) >= LEAST_TOKENS:
            self._end_window()
        self._counts.setdefault(layer, Counter()).update(experts)
        self._token_counts[layer] = self._token_counts.get(layer, 0) + token_count

    def pop_windows(self, *, is_last: bool = False) -> list[LearnedWindow]:
        """Return the windows since the last call; if `is_last`, the unfinished one too."""
        if is_last and self._token_counts:
            self._end_window()
        windows, self._windows = self._windows, []
        return windows

    def _end_window(self) -> None:
        day, token_count = int(time.time() // _SECONDS_A_DAY), max(self._token_counts.values())
        counts = Counter(
            {
                ExpertKey(layer, expert): count
                for layer, of_layer in self._counts.items()
                for expert, count in of_layer.items()
            }
        )
        self._windows.append(LearnedWindow(day, token_count, counts))
        self._counts, self._token_counts = {}, {}
