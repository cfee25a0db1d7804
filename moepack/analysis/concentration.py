"""The concentration gate: whether some experts are chosen so much more that it is worth something.

Apparent skew grows as samples shrink. So what the top experts cover is learned on one half of the
trace and measured on the other, and beside it stands what a router that chooses evenly would give
with as many tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.analysis.lru import LatestCaches
from moepack.hotness.counter import Half, Tally
from moepack.trace.model import Ints, Item, Phase

TOP_PERCENTS = (5, 10, 25, 50)
GATE_PERCENT = 25
"""The verdict looks at what a quarter of the experts is worth: a cache of usual size."""
_DRAWS = 16
_LEAST_SELECTIONS = 10
"""An expert of an even router has to be met so often in the half that is learned from."""
_CLEAR = 0.05
"""Shares that differ by less are called equal."""


class Coverage(NamedTuple):
    """What the top `percent` of experts cover: of the held-out half, and with an even router."""

    percent: int
    expert_count: int
    share: float | None
    even_share: float | None
    latest_share: float | None
    """What a cache of the latest as many experts a layer would have had."""


class Skew(NamedTuple):
    """How uneven one layer is, or all (`layer` None). Entropy 1 and Gini 0 are even."""

    layer: int | None
    expert_count: int
    never_count: int
    selection_count: int
    entropy: float
    gini: float
    coverage: tuple[Coverage, ...]

    def to_json(self) -> dict[str, Any]:
        """Give this as JSON values."""
        return self._asdict() | {"coverage": [one._asdict() for one in self.coverage]}


class Concentration(NamedTuple):
    """The skews of all layers together and of each, and what follows from them."""

    token_count: int | None
    request_count: int | None
    halves: str | None
    total: Skew
    layers: tuple[Skew, ...]
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Give this as JSON values."""
        return self._asdict() | {
            "total": self.total.to_json(),
            "layers": [skew.to_json() for skew in self.layers],
        }


def measure(
    tally: Tally, latest: LatestCaches, shape: Mapping[int, int] | None = None
) -> Concentration:
    """Judge what was counted.

    `shape` has the experts of each layer; without it all have as many as the highest number says
    that was met in any.
    """
    counts = tally.counts
    layers = sorted(shape) if shape else [int(n) for n in np.flatnonzero(counts.sum(axis=1))]
    sizes = [shape[layer] if shape else counts.shape[1] for layer in layers]
    halves = tally.halves()
    by, learned, measured = halves if halves else (None, None, None)
    rows = [_row(counts, layer, size) for layer, size in zip(layers, sizes, strict=True)]
    skews = []
    for layer, size, row in zip(layers, sizes, rows, strict=True):
        coverage = _coverage(learned, measured, [layer], [size], latest)
        skews.append(_skew(layer, row, size, coverage))
    everything = np.concatenate(rows)
    total = _skew(
        None, everything, len(everything), _coverage(learned, measured, layers, sizes, latest)
    )
    verdict, reason = _verdict(total, learned)
    requests = None if tally.loose_count else tally.request_count
    return Concentration(
        tally.stated_token_count, requests, by, total, tuple(skews), verdict, reason
    )


def count(items: Iterable[Item]) -> tuple[Tally, LatestCaches]:
    """Take a whole trace; prefill is left out, unless there is nothing else, as in an imatrix."""
    everything, tally, latest = Tally(), Tally(frozenset({Phase.DECODE})), LatestCaches()
    for item in items:
        everything.add(item)
        tally.add(item)
        latest.add(item)
    return tally if tally.selection_count else everything, latest


def heat_table(tally: Tally) -> NDArray[np.float64]:
    """Give each layer's counts, hottest first, as multiples of an even share [layers, experts]."""
    counts = np.sort(tally.counts, axis=1)[:, ::-1]
    heat: NDArray[np.float64] = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
    return heat


def curves(tally: Tally, latest: LatestCaches) -> dict[str, list[float]]:
    """Give what the top experts cover, by their share in steps of 2 %, as `chart.heat` draws it."""
    halves = tally.halves()
    if halves is None:
        return {"ranked and measured on the same": _curve(Half(0, tally.counts), tally.counts)}
    _, learned, measured = halves
    found = {
        "ranked and measured on the same (looks better)": _curve(measured, measured.counts),
        "learned on one half, measured on the other": _curve(learned, measured.counts),
        "even router": [n / 50 for n in range(51)],
    }
    if latest.token_count:
        width = tally.counts.shape[1]
        shares = [latest.hit_share(round(width * n / 50)) or 0.0 for n in range(51)]
        found["cache of the latest"] = shares
    return found


def _curve(learned: Half, measured: Ints) -> list[float]:
    layers, width = measured.shape
    ranked = np.zeros(measured.shape, np.int64)
    for layer in range(layers):
        order = np.argsort(-_row(learned.counts, layer, width), kind="stable")
        ranked[layer] = measured[layer, order]
    reached = np.concatenate(([0], np.cumsum(ranked.sum(axis=0))))
    places = np.rint(np.linspace(0, width, 51)).astype(np.int64)
    return [float(value) for value in reached[places] / max(reached[-1], 1)]


def entropy(counts: Ints) -> float:
    """Give the entropy of counts, as a share of an even distribution's; 1 for nothing."""
    total = counts.sum()
    if total == 0 or len(counts) < 2:
        return 1.0
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum() / np.log(len(counts)))


def gini(counts: Ints) -> float:
    """Give the Gini coefficient: 0 where all are alike, towards 1 where one has everything."""
    total = counts.sum()
    if total == 0:
        return 0.0
    ordered = np.sort(counts)
    ranks = np.arange(1, len(ordered) + 1)
    return float(
        2 * (ranks * ordered).sum() / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
    )


def _skew(layer: int | None, row: Ints, size: int, coverage: tuple[Coverage, ...]) -> Skew:
    never = size - int(np.count_nonzero(row))
    return Skew(layer, size, never, int(row.sum()), entropy(row), gini(row), coverage)


def _row(counts: Ints, layer: int, size: int) -> Ints:
    row = np.zeros(size, np.int64)
    if layer < counts.shape[0]:
        have = counts[layer, :size]
        row[: len(have)] = have
    return row


def _coverage(
    learned: Half | None,
    measured: Half | None,
    layers: list[int],
    sizes: list[int],
    latest: LatestCaches,
) -> tuple[Coverage, ...]:
    """Take the top of each of `layers`, and measure all of them together."""
    found = []
    for percent in TOP_PERCENTS:
        tops = [max(1, round(size * percent / 100)) for size in sizes]
        share = even = None
        if learned is not None and measured is not None:
            share = _covered(learned, measured, layers, sizes, tops)
            even = _even(learned, measured, layers, sizes, tops)
        kept = _latest(latest, layers, tops)
        found.append(Coverage(percent, sum(tops), share, even, kept))
    return tuple(found)


def _covered(
    learned: Half, measured: Half, layers: list[int], sizes: list[int], tops: list[int]
) -> float | None:
    hits = total = 0
    for layer, size, top in zip(layers, sizes, tops, strict=True):
        order = np.argsort(-_row(learned.counts, layer, size), kind="stable")
        row = _row(measured.counts, layer, size)
        hits += int(row[order[:top]].sum())
        total += int(row.sum())
    return hits / total if total else None


def _even(
    learned: Half, measured: Half, layers: list[int], sizes: list[int], tops: list[int]
) -> float | None:
    """Do the same with a router that chooses evenly, as many of as many experts for each token."""
    draw = np.random.default_rng(0)
    hits = total = 0.0
    for layer, size, top in zip(layers, sizes, tops, strict=True):
        pair = []
        for half in (learned, measured):
            used = _row(half.counts, layer, size).sum() / max(half.token_count, 1)
            chance = min(1.0, used / size)
            pair.append(draw.binomial(half.token_count, chance, (_DRAWS, size)))
        order = np.argsort(-pair[0], axis=1, kind="stable")[:, :top]
        hits += float(np.take_along_axis(pair[1], order, axis=1).sum())
        total += float(pair[1].sum())
    return hits / total if total else None


def _latest(latest: LatestCaches, layers: list[int], tops: list[int]) -> float | None:
    if not latest.token_count:
        return None
    met = set(latest.layers())
    pairs = [(layer, top) for layer, top in zip(layers, tops, strict=True) if layer in met]
    shares = [latest.hit_share(top, layer) or 0.0 for layer, top in pairs]
    return float(np.mean(shares)) if shares else None


def _verdict(total: Skew, learned: Half | None) -> tuple[str, str]:
    """Say in a word and in a sentence what the skew is worth."""
    gate = next(one for one in total.coverage if one.percent == GATE_PERCENT)
    if learned is None or gate.share is None or gate.even_share is None:
        return "unknown", "only counts are known: there is no other half to measure on"
    met = learned.counts.sum() / max(total.expert_count, 1)
    said = (
        f"the top {gate.percent} % of each layer's experts, learned on one half, cover "
        f"{gate.share:.0%} of the other half's selections, of an even router's "
        f"{gate.even_share:.0%}"
    )
    if met < _LEAST_SELECTIONS:
        return "small", (
            f"the sample is too small to say: {met:.1f} selections an expert in the half that is "
            f"learned from, at least {_LEAST_SELECTIONS} are needed ({said})"
        )
    latest = gate.latest_share
    recency = "" if latest is None else f"; a cache of the latest as many has {latest:.0%}"
    if latest is not None and latest > gate.share + _CLEAR:
        return "recency", f"recency is better than static hotness: {said}{recency}"
    if gate.share > gate.even_share + _CLEAR:
        return "static", f"static hotness is worth pinning: {said}{recency}"
    return "even", f"static hotness is worth nothing here: {said}{recency}"
