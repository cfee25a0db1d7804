"""How uneven counts are: entropy, Gini, and what the top experts cover.

All of it is arithmetic on the counts of layers, learned on one half and measured on the other.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moepack.hotness.counter import Halves
from moepack.trace.model import Ints

CURVE_POINTS = 51
_DRAWS = 16


class LayerCounts(NamedTuple):
    """A layer: how many experts it has, and how often each was chosen in all and in each half."""

    number: int
    expert_count: int
    counts: Ints
    learned: Ints
    measured: Ints


def entropy(counts: Ints) -> float:
    """Return the entropy of counts, as a share of an even distribution's; 1 for nothing."""
    total = counts.sum()
    if total == 0 or len(counts) < 2:
        return 1.0
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() / np.log(len(counts)))


def gini(counts: Ints) -> float:
    """Return the Gini coefficient: 0 where all are alike, towards 1 where one has everything."""
    total = counts.sum()
    if total == 0:
        return 0.0
    ordered = np.sort(counts)
    ranks = np.arange(1, len(ordered) + 1)
    return float(
        2 * (ranks * ordered).sum() / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
    )


def _by_heat(counts: Ints) -> Ints:
    """Return the experts of a layer, hottest first; those that are alike by their numbers."""
    return np.argsort(-counts, kind="stable")


def curve(layers: Sequence[tuple[Ints, Ints]]) -> list[float]:
    """Rank each layer by the first of its counts; return what the top cover of the second."""
    width = max((len(learned) for learned, _ in layers), default=0)
    by_rank = np.zeros(width, np.int64)
    for learned, measured in layers:
        by_rank[: len(learned)] += measured[_by_heat(learned)]
    reached = np.concatenate(([0], np.cumsum(by_rank)))
    places = np.rint(np.linspace(0, width, CURVE_POINTS)).astype(np.int64)
    shares: list[float] = (reached[places] / max(reached[-1], 1)).tolist()
    return shares


def top_counts(expert_counts: Iterable[int], percent: int) -> list[int]:
    """Return how many experts are the top of each layer."""
    return [max(1, round(count * percent / 100)) for count in expert_counts]


def covered(layers: Sequence[LayerCounts], tops: Sequence[int]) -> float | None:
    """Return what the top of each layer covers, by what was learned; None of no selections."""
    hits = total = 0
    for layer, top in zip(layers, tops, strict=True):
        hits += int(layer.measured[_by_heat(layer.learned)[:top]].sum())
        total += int(layer.measured.sum())
    return hits / total if total else None


def even_share(layers: Sequence[LayerCounts], tops: Sequence[int], halves: Halves) -> float | None:
    """Do the same with a router that chooses evenly, as many of as many experts for each token."""
    draw = np.random.default_rng(0)
    hits = total = 0.0
    for layer, top in zip(layers, tops, strict=True):
        drawn = []
        for half, counts in ((halves.learned, layer.learned), (halves.measured, layer.measured)):
            used = counts.sum() / max(half.token_count, 1)
            chance = min(1.0, used / layer.expert_count)
            drawn.append(draw.binomial(half.token_count, chance, (_DRAWS, layer.expert_count)))
        learned, measured = drawn
        order = np.argsort(-learned, axis=1, kind="stable")[:, :top]
        hits += float(np.take_along_axis(measured, order, axis=1).sum())
        total += float(measured.sum())
    return hits / total if total else None
