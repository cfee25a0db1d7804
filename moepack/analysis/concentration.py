"""The concentration gate: whether some experts are chosen so much more that it is worth something.

Apparent skew grows as samples shrink. So what the top experts cover is learned on one half of the
trace and measured on the other, and beside it stands what a router that chooses evenly would give
with as many tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moepack.analysis.lru import LayerLru
from moepack.analysis.skew import (
    CURVE_POINTS,
    LayerCounts,
    covered,
    curve,
    entropy,
    even_share,
    gini,
)
from moepack.errors import TraceError
from moepack.hotness.counter import Half, Halves, SelectionCounter
from moepack.shape import ModelShape
from moepack.trace.formats.registry import ReadOptions, feed
from moepack.trace.model import Item
from moepack.trace.steps import DECODE_PHASES

TOP_PERCENTS = (5, 10, 25, 50)
GATE_PERCENT = 25
"""The verdict looks at what a quarter of the experts is worth: a cache of usual size."""
_LEAST_SELECTIONS = 10
"""An expert of an even router has to be met so often in the half that is learned from."""
_CLEAR = 0.05
"""Shares that differ by less are called equal."""


@dataclass(frozen=True, slots=True)
class TopCoverage:
    """What the top `percent` of the experts cover of the held-out half; None where there is none.

    `even_share` is what they would with an even router; `latest_share` is the hit rate of an LRU
    cache that holds as many experts of each layer.
    """

    percent: int
    expert_count: int
    share: float | None
    even_share: float | None
    latest_share: float | None


@dataclass(frozen=True, slots=True)
class Skew:
    """How uneven one layer is, or all (`layer` None). Entropy 1 and Gini 0 are even."""

    layer: int | None
    expert_count: int
    never_count: int
    selection_count: int
    entropy: float
    gini: float
    coverage: tuple[TopCoverage, ...]


@dataclass(frozen=True, slots=True)
class Concentration:
    """The skews of all layers together and of each, and what follows from them.

    `halves` says what divides them (`requests` or `time`). `warnings` counts what was left out of
    the files, by problem.
    """

    token_count: int | None
    request_count: int | None
    halves: str | None
    total: Skew
    layers: tuple[Skew, ...]
    verdict: str
    reason: str
    warnings: Counter[str] = field(default_factory=Counter)


class RoutingSample:
    """What was routed, to be judged: counts, their halves, and the hit rates of LRU caches.

    Prefill is left out, unless there is nothing else, as in an imatrix. `shape` is the model's;
    without it all layers have as many experts as the highest number says that was met in any.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        self._shape = shape
        self._everything, self._decode = SelectionCounter(), SelectionCounter(DECODE_PHASES)
        self._lru = LayerLru()
        self.path: str | None = None
        """The first file, for messages."""
        self.warnings: Counter[str] = Counter()

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        self._everything.add(item)
        self._decode.add(item)
        self._lru.add(item)

    @property
    def _counter(self) -> SelectionCounter:
        return self._decode if self._decode.selection_count else self._everything

    def concentration(self) -> Concentration:
        """Judge the sample. Raises TraceError where nothing was chosen."""
        counter, halves = self._counter, self._counter.halves()
        if not counter.selection_count:
            raise TraceError("nothing was counted", path=self.path, hint="it has no selections")
        layers = self._layers(halves)
        skews = tuple(self._skew(layer.number, [layer], halves) for layer in layers)
        total = self._skew(None, layers, halves)
        verdict, reason = judge(total, halves.learned if halves else None)
        return Concentration(
            counter.stated_token_count,
            None if counter.loose_count else counter.request_count,
            halves.by if halves else None,
            total,
            skews,
            verdict,
            reason,
            self.warnings,
        )

    def heat_table(self) -> tuple[tuple[int, ...], NDArray[np.float64]]:
        """Return the layers, and their counts, hottest first, as multiples of an even share."""
        layers = self._layers(None)
        width = max((layer.expert_count for layer in layers), default=0)
        table = np.zeros((len(layers), width))
        for row, layer in zip(table, layers, strict=True):
            row[: layer.expert_count] = np.sort(layer.counts)[::-1]
        heat = table / np.maximum(table.mean(axis=1, keepdims=True), 1e-9)
        return tuple(layer.number for layer in layers), heat

    def curves(self) -> dict[str, list[float]]:
        """Return what the top experts cover, by their share in steps of 2 %."""
        halves = self._counter.halves()
        layers = self._layers(halves)
        if halves is None:
            counts = [(layer.counts, layer.counts) for layer in layers]
            return {"ranked and measured on the same": curve(counts)}
        same = [(layer.measured, layer.measured) for layer in layers]
        other = [(layer.learned, layer.measured) for layer in layers]
        curves = {
            "ranked and measured on the same (looks better)": curve(same),
            "learned on one half, measured on the other": curve(other),
            "even router": np.linspace(0, 1, CURVE_POINTS).tolist(),
        }
        if self._lru.token_count:
            width = self._counter.places.width
            sizes = np.rint(np.linspace(0, width, CURVE_POINTS)).astype(int).tolist()
            curves["LRU cache"] = [self._lru.hit_rate(size) or 0.0 for size in sizes]
        return curves

    def _layers(self, halves: Halves | None) -> list[LayerCounts]:
        places, counts = self._counter.places, self._counter.counts
        if self._shape is not None:
            expert_counts = self._shape.expert_counts
        else:
            met = np.unique(places.keys(np.flatnonzero(counts))[0]).tolist()
            expert_counts = dict.fromkeys(met, places.width)
        nothing = np.zeros(0, np.int64)
        columns = (
            counts,
            halves.learned.counts if halves else nothing,
            halves.measured.counts if halves else nothing,
        )
        return [
            LayerCounts(layer, size, *(places.row(column, layer, size) for column in columns))
            for layer, size in sorted(expert_counts.items())
        ]

    def _skew(
        self, number: int | None, layers: Sequence[LayerCounts], halves: Halves | None
    ) -> Skew:
        counts = np.concatenate([layer.counts for layer in layers])
        coverage = tuple(self._coverage(percent, layers, halves) for percent in TOP_PERCENTS)
        never_count = len(counts) - int(np.count_nonzero(counts))
        selections = int(counts.sum())
        return Skew(
            number, len(counts), never_count, selections, entropy(counts), gini(counts), coverage
        )

    def _coverage(
        self, percent: int, layers: Sequence[LayerCounts], halves: Halves | None
    ) -> TopCoverage:
        """Take the top of each layer, and measure all of them together."""
        tops = [max(1, round(layer.expert_count * percent / 100)) for layer in layers]
        share = even = None
        if halves is not None:
            share = covered(layers, tops)
            even = even_share(layers, tops, halves)
        return TopCoverage(percent, sum(tops), share, even, self._hit_rate(layers, tops))

    def _hit_rate(self, layers: Sequence[LayerCounts], tops: Sequence[int]) -> float | None:
        met = set(self._lru.layers)
        rates = [
            self._lru.hit_rate(top, layer.number) or 0.0
            for layer, top in zip(layers, tops, strict=True)
            if layer.number in met
        ]
        return float(np.mean(rates)) if rates else None


def read_sample(paths: Sequence[str], options: ReadOptions = ReadOptions()) -> RoutingSample:
    """Read traces, imatrices and hotness files together. Raises what reading them raises."""
    sample = RoutingSample(options.shape)
    sample.path = paths[0] if paths else None
    sample.warnings = feed(paths, options, sample.add)
    return sample


def concentration(paths: Sequence[str], options: ReadOptions = ReadOptions()) -> Concentration:
    """Judge traces, imatrices and hotness files together.

    Raises TraceError for what is wrong in a file, and where nothing was chosen.
    """
    return read_sample(paths, options).concentration()


def judge(total: Skew, learned: Half | None) -> tuple[str, str]:
    """Say in a word and in a sentence what the skew is worth."""
    gate = next(top for top in total.coverage if top.percent == GATE_PERCENT)
    if learned is None or gate.share is None or gate.even_share is None:
        return "unknown", "only counts are known: there is no other half to measure on"
    met = learned.counts.sum() / max(total.expert_count, 1)
    shares = (
        f"the top {gate.percent} % of each layer's experts, learned on one half, cover "
        f"{gate.share:.0%} of the selections in the other half; with an even router they would "
        f"cover {gate.even_share:.0%}"
    )
    if met < _LEAST_SELECTIONS:
        return "small", (
            f"the sample is too small to say: {met:.1f} selections an expert in the half that is "
            f"learned from, at least {_LEAST_SELECTIONS} are needed ({shares})"
        )
    hit_rate = gate.latest_share
    lru = "" if hit_rate is None else f"; an LRU cache that holds as many has {hit_rate:.0%}"
    if hit_rate is not None and hit_rate > gate.share + _CLEAR:
        return "recency", f"recency is better than static hotness: {shares}{lru}"
    if gate.share > gate.even_share + _CLEAR:
        return "static", f"static hotness is worth pinning: {shares}{lru}"
    return "even", f"static hotness is worth nothing here: {shares}{lru}"
