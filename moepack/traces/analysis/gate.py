"""The concentration gate: the worth of pinning the most frequent experts.

Selections by layer are divided into a half to learn from and a half to measure on. The verdict
follows the split in time: experts pinned today have to be worth it tomorrow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepack.traces.hotness.counter import covered_count, hottest_first
from moepack.traces.model import Ints
from moepack.traces.simulation.facts import LEAST_SELECTIONS, needed_tokens

GATE_PERCENT = 25
"""The verdict is on a quarter of the experts: a cache of usual size."""
CLEAR = 0.05
"""Shares that differ by less are called equal."""

_WORDS = {
    "recency": "recency is better than static hotness",
    "static": "static hotness is worth pinning",
    "even": "static hotness is worth nothing here",
}
CURVE_POINTS = 51
_DRAWS = 16


class Evidence(NamedTuple):
    """The share of the measured half that the top quarter of the experts covers.

    `uniform_share` is that of a uniform router; `selections_per_expert` are those of the smaller
    half. `needed_token_count` is about how many tokens are enough, None if these are.
    """

    share: float
    uniform_share: float
    selections_per_expert: float
    needed_token_count: int | None = None


class LayerCounts(NamedTuple):
    """The number of a layer, and the counts of its experts: in all, and in each half."""

    number: int
    counts: Ints
    learned: Ints
    measured: Ints


class Division(NamedTuple):
    """The layers of a sample, and how many tokens each of its halves has: 0 if there are none."""

    layers: Sequence[LayerCounts]
    learned_token_count: int = 0
    measured_token_count: int = 0

    def tops(self, percent: int) -> list[int]:
        """Return how many experts of each layer are its top `percent`, one at least."""
        return [max(1, round(len(layer.counts) * percent / 100)) for layer in self.layers]

    def share(self, tops: Sequence[int]) -> float | None:
        """Return the share of the measured half that the learned top of each layer covers.

        None if nothing was measured.
        """
        hits = total = 0
        for layer, top in zip(self.layers, tops, strict=True):
            ones = np.ones(len(layer.counts), np.int64)
            hits += covered_count(layer.learned, layer.measured, ones, top)
            total += int(layer.measured.sum())
        return hits / total if total else None

    def uniform_share(self, tops: Sequence[int]) -> float | None:
        """Return the same for a uniform router, with as many tokens that use as many experts."""
        draw = np.random.default_rng(0)
        hits = total = 0.0
        token_counts = self.learned_token_count, self.measured_token_count
        for layer, top in zip(self.layers, tops, strict=True):
            drawn = []
            for token_count, counts in zip(
                token_counts, (layer.learned, layer.measured), strict=True
            ):
                used = counts.sum() / max(token_count, 1)
                chance = min(1.0, used / len(counts))
                drawn.append(draw.binomial(token_count, chance, (_DRAWS, len(counts))))
            learned, measured = drawn
            order = np.argsort(-learned, axis=1, kind="stable")[:, :top]
            hits += float(np.take_along_axis(measured, order, axis=1).sum())
            total += float(measured.sum())
        return hits / total if total else None

    def evidence(self) -> Evidence | None:
        """Return the evidence for the verdict; None without two halves."""
        tops = self.tops(GATE_PERCENT)
        share, uniform = self.share(tops), self.uniform_share(tops)
        if share is None or uniform is None:
            return None
        learned = sum(int(layer.learned.sum()) for layer in self.layers)
        measured = sum(int(layer.measured.sum()) for layer in self.layers)
        expert_count = sum(len(layer.counts) for layer in self.layers)
        per_expert = min(learned, measured) / expert_count
        token_count = self.learned_token_count + self.measured_token_count
        return Evidence(share, uniform, per_expert, needed_tokens(token_count, per_expert))


def entropy(counts: Ints) -> float:
    """Return the entropy of counts, as a share of a uniform distribution's; 1 without any."""
    total = counts.sum()
    if total == 0 or len(counts) < 2:
        return 1.0
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() / np.log(len(counts)))


def gini(counts: Ints) -> float:
    """Return the Gini coefficient: 0 if all counts are equal, towards 1 if one has everything."""
    total = counts.sum()
    if total == 0:
        return 0.0
    ordered = np.sort(counts)
    ranks = np.arange(1, len(ordered) + 1)
    return float(
        2 * (ranks * ordered).sum() / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
    )


def coverage_curve(layers: Sequence[tuple[Ints, Ints]]) -> list[float]:
    """Return the shares of the measured counts that the top experts cover, by their share.

    `layers` are learned counts, by which each is ranked, and measured ones.
    """
    width = max((len(learned) for learned, _ in layers), default=0)
    by_rank = np.zeros(width, np.int64)
    for learned, measured in layers:
        by_rank[: len(learned)] += measured[hottest_first(learned)]
    covered = np.concatenate(([0], np.cumsum(by_rank)))
    points = np.rint(np.linspace(0, width, CURVE_POINTS)).astype(np.int64)
    shares: list[float] = (covered[points] / max(covered[-1], 1)).tolist()
    return shares


def judge(evidence: Evidence | None, latest_share: float | None) -> str:
    """Return the verdict in a word; `latest_share` is an LRU cache's hit rate."""
    if evidence is None:
        return "unknown"
    if evidence.selections_per_expert < LEAST_SELECTIONS:
        return "small"
    if latest_share is not None and latest_share > evidence.share + CLEAR:
        return "recency"
    return "static" if evidence.share > evidence.uniform_share + CLEAR else "even"


def explain(evidence: Evidence | None, latest_share: float | None) -> str:
    """Return the verdict in a sentence."""
    word = judge(evidence, latest_share)
    if evidence is None:
        return "there are no two halves to compare: only counts are known, or a single token"
    shares = (
        f"the top {GATE_PERCENT} % of each layer's experts, learned on the earlier half, cover "
        f"{evidence.share:.0%} of the selections in the later half; with a uniform router they "
        f"would cover {evidence.uniform_share:.0%}"
    )
    if word == "small":
        return (
            f"the sample is too small: {evidence.selections_per_expert:.1f} selections an "
            f"expert in the smaller half, at least {LEAST_SELECTIONS} are needed, as some "
            f"{evidence.needed_token_count:,} tokens have ({shares})"
        )
    if latest_share is not None:
        shares += f"; an LRU cache that holds as many has {latest_share:.0%}"
    return f"{_WORDS[word]}: {shares}"
