"""What is learned from runs, and the verdict of the concentration gate on it.

Selections are counted as they come, with the hit rate of LRU caches, since their order is not kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepack.analysis.skew import LayerCounts, covered, even_share, top_counts
from moepack.analysis.verdict import CLEAR, GATE_PERCENT, Evidence, explain, judge
from moepack.hotness.counter import Half, Halves
from moepack.hotness.learned import LEAST_TOKENS, Learned, Numbers, Window

_SECONDS_A_DAY = 86_400
_LEAST_MET = 1
"""Selections of an expert in the smaller half from which on reading it ahead is tried: it costs
little, unlike pinning."""


class LearnedVerdict(NamedTuple):
    """What learned counts are worth: `verdict` and `reason` are those of the concentration gate.

    `is_warming` is whether the most used experts are worth reading before they are chosen: they
    cover more of the later half than chance explains.
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
    evidence = _evidence(learned)
    verdict = judge(evidence, learned.hit_rate)
    reason = explain(evidence, None, learned.hit_rate)
    is_warming = (
        evidence is not None
        and evidence.met >= _LEAST_MET
        and evidence.share > evidence.even_share + CLEAR
    )
    return LearnedVerdict(verdict, reason, is_warming)


def _evidence(learned: Learned) -> Evidence | None:
    parts = learned.halves()
    if parts is None:
        return None
    earlier, later = (Half(part.token_count, part.counts) for part in parts)
    halves = Halves("time", earlier, later)
    layers = []
    for layer, first in learned.first_places.items():
        count = learned.expert_counts[layer]
        columns = (half[first : first + count] for half in (learned.counts, *_counts(halves)))
        layers.append(LayerCounts(layer, count, *columns))
    tops = top_counts(learned.expert_counts.values(), GATE_PERCENT)
    share, even = covered(layers, tops), even_share(layers, tops, halves)
    if share is None or even is None:
        return None
    met = min(int(half.sum()) for half in _counts(halves)) / learned.place_count
    return Evidence(share, even, met)


class UseCounter:
    """Counts selections as they come; `learned` is what was learned before.

    Beside, LRU caches of a quarter of each layer are followed, which begin with the experts that
    were used most; lookups count where a cache is full.
    """

    def __init__(self, learned: Learned) -> None:
        self._expert_counts = learned.expert_counts
        self._windows: list[Window] = []
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
        """Count what a layer chose: for each of `token_count` tokens as many experts, in turn.

        What the model cannot have chosen, as another one in the program, is left out.
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

    def take(self, *, is_last: bool = False) -> list[Window]:
        """Return the windows that are whole since the last time; the last one as it is."""
        if is_last and self._token_counts:
            self._end_window()
        windows, self._windows = self._windows, []
        return windows

    def _end_window(self) -> None:
        layers = self._expert_counts.items()
        counts = [np.bincount(self._chosen[layer], minlength=count) for layer, count in layers]
        self._windows.append(
            Window(
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


def _counts(halves: Halves) -> tuple[Numbers, Numbers]:
    return halves.learned.counts, halves.measured.counts
