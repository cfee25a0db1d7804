"""The concentration gate: whether some experts are chosen so much more that it is worth something.

Apparent skew grows as samples shrink. So what the top experts cover is learned on the earlier half
of the trace and measured on the later, and beside it stands what a router that chooses evenly would
give with as many tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

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
    top_counts,
)
from moepack.analysis.verdict import GATE_PERCENT, Evidence, explain, judge
from moepack.errors import TraceError
from moepack.hotness.counter import Halves, SelectionCounter
from moepack.paths import PathOrPaths, path_texts
from moepack.shape import ModelShape
from moepack.trace.formats.registry import ReadOptions, feed
from moepack.trace.formats.traced_model import TracedModel, options_of
from moepack.trace.model import Ints, Item, Origin
from moepack.trace.stated_experts import StatedExperts
from moepack.trace.steps import DECODE_PHASES

TOP_PERCENTS = (5, 10, 25, 50)


@dataclass(frozen=True, slots=True)
class TopCoverage:
    """What the top `percent` of the experts cover of the later half; None where there is none.

    `even_share` is what they would with an even router; `latest_share` is the hit rate of an LRU
    cache that holds as many experts of each layer, None where a token uses more than that;
    `interleaved_share` is what they cover where every other request is learned from, None where
    there is but one.
    """

    percent: int
    expert_count: int
    share: float | None
    even_share: float | None
    latest_share: float | None
    interleaved_share: float | None


@dataclass(frozen=True, slots=True)
class Skew:
    """How uneven one layer is, or all (`layer` None). Entropy 1 and Gini 0 are even.

    `never_count` is None where it is not known how many experts there are.
    """

    layer: int | None
    expert_count: int
    never_count: int | None
    selection_count: int
    entropy: float
    gini: float
    coverage: tuple[TopCoverage, ...]


@dataclass(frozen=True, slots=True)
class Concentration:
    """The skews of all layers together and of each, and what follows from them.

    `has_expert_counts` is whether the model or the files say how many experts each layer has; where
    they do not, it is taken to be one more than the highest number that was chosen in any.
    `halves` says what divides them: `time`. `interleaved_verdict` is what the verdict would be if
    every other request were learned from: where it is another, what is hot changes over time.
    `warnings` counts what was left out of the files, by problem.
    """

    token_count: int | None
    request_count: int | None
    has_expert_counts: bool
    halves: str | None
    total: Skew
    layers: tuple[Skew, ...]
    verdict: str
    interleaved_verdict: str
    reason: str
    warnings: Counter[str] = field(default_factory=Counter)


class _Division(NamedTuple):
    """A way to divide a sample into halves, of which there may be none, and the counts by it."""

    halves: Halves | None
    layers: Sequence[LayerCounts]

    def of_layer(self, place: int) -> Self:
        """Return the same of one layer alone."""
        return self._replace(layers=self.layers[place : place + 1])

    def share(self, tops: Sequence[int]) -> float | None:
        """Return what the top of each layer covers, of all of them together."""
        return None if self.halves is None else covered(self.layers, tops)

    def even_share(self, tops: Sequence[int]) -> float | None:
        """Return what it would with an even router."""
        return None if self.halves is None else even_share(self.layers, tops, self.halves)

    def evidence(self) -> Evidence | None:
        """Return what the verdict follows from."""
        tops = _tops(self.layers, GATE_PERCENT)
        share, even = self.share(tops), self.even_share(tops)
        if share is None or even is None:
            return None
        learned = sum(int(layer.learned.sum()) for layer in self.layers)
        measured = sum(int(layer.measured.sum()) for layer in self.layers)
        expert_count = sum(layer.expert_count for layer in self.layers)
        return Evidence(share, even, min(learned, measured) / expert_count)


class RoutingSample:
    """What was routed, to be judged: counts, their halves, and the hit rates of LRU caches.

    Prefill is left out, unless there is nothing else, as in an imatrix. `shape` is the model's;
    without it layers have the experts that files say they have, or else as many as the highest
    number says that was met in any.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        self._experts = StatedExperts(shape and shape.expert_counts)
        self._everything, self._decode = SelectionCounter(), SelectionCounter(DECODE_PHASES)
        self._lru = LayerLru()
        self.path: str | None = None
        """The first file, for messages."""
        self.warnings: Counter[str] = Counter()

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, Origin):
            self._experts.add(item)
        self._everything.add(item)
        self._decode.add(item)
        self._lru.add(item)

    @property
    def _counter(self) -> SelectionCounter:
        return self._decode if self._decode.selection_count else self._everything

    def concentration(self) -> Concentration:
        """Judge the sample. Raises TraceError where nothing was chosen."""
        counter = self._counter
        if not counter.selection_count:
            raise TraceError("nothing was counted", path=self.path, hint="it has no selections")
        in_time, interleaved = self._divided(counter.halves()), self._divided(counter.interleaved())
        evidence = in_time.evidence(), interleaved.evidence()
        hit_rate = self._hit_rate(in_time.layers, _tops(in_time.layers, GATE_PERCENT))
        reason = explain(*evidence, hit_rate)
        if not self._experts.are_known:
            reason += f"; {_not_stated(counter.places.width)}"
        return Concentration(
            token_count=counter.stated_token_count,
            request_count=None if counter.loose_count else counter.request_count,
            has_expert_counts=self._experts.are_known,
            halves=in_time.halves.by if in_time.halves else None,
            total=self._skew(None, in_time, interleaved),
            layers=tuple(
                self._skew(layer.number, in_time.of_layer(place), interleaved.of_layer(place))
                for place, layer in enumerate(in_time.layers)
            ),
            verdict=judge(evidence[0], hit_rate),
            interleaved_verdict=judge(evidence[1], hit_rate),
            reason=reason,
            warnings=self.warnings,
        )

    def heat_table(self) -> tuple[tuple[int, ...], NDArray[np.float64]]:
        """Return the layers, and their counts, hottest first, as multiples of an even share."""
        layers = self._divided(None).layers
        width = max((layer.expert_count for layer in layers), default=0)
        table = np.zeros((len(layers), width))
        for row, layer in zip(table, layers, strict=True):
            row[: layer.expert_count] = np.sort(layer.counts)[::-1]
        heat = table / np.maximum(table.mean(axis=1, keepdims=True), 1e-9)
        return tuple(layer.number for layer in layers), heat

    def curves(self) -> dict[str, list[float]]:
        """Return what the top experts cover, by their share in steps of 2 %."""
        halves, layers = self._divided(self._counter.halves())
        if halves is None:
            counts = [(layer.counts, layer.counts) for layer in layers]
            return {"ranked and measured on the same": curve(counts)}
        same = [(layer.measured, layer.measured) for layer in layers]
        curves = {
            "ranked and measured on the later half (looks better)": curve(same),
            "learned on the earlier half, measured on the later": curve(_sides(layers)),
            "even router": np.linspace(0, 1, CURVE_POINTS).tolist(),
        }
        interleaved, layers = self._divided(self._counter.interleaved())
        if interleaved is not None:
            curves["learned on every other request, measured on the rest"] = curve(_sides(layers))
        if self._lru.token_count:
            shares = np.linspace(0, 1, CURVE_POINTS).tolist()
            sizes = [[round(layer.expert_count * share) for layer in layers] for share in shares]
            rates = [self._hit_rate(layers, size) for size in sizes]
            curves["LRU cache"] = [math.nan if rate is None else rate for rate in rates]
        return curves

    def _divided(self, halves: Halves | None) -> _Division:
        places, counts = self._counter.places, self._counter.counts
        expert_counts = self._experts.by_layer(*places.keys(np.flatnonzero(counts)))
        nothing = np.zeros(0, np.int64)
        columns = (
            counts,
            halves.learned.counts if halves else nothing,
            halves.measured.counts if halves else nothing,
        )
        layers = [
            LayerCounts(layer, size, *(places.row(column, layer, size) for column in columns))
            for layer, size in sorted(expert_counts.items())
        ]
        return _Division(halves, layers)

    def _skew(self, number: int | None, in_time: _Division, interleaved: _Division) -> Skew:
        counts = np.concatenate([layer.counts for layer in in_time.layers])
        never_count = len(counts) - int(np.count_nonzero(counts))
        coverage = []
        for percent in TOP_PERCENTS:
            tops = _tops(in_time.layers, percent)
            hit_rate = self._hit_rate(in_time.layers, tops)
            shares = in_time.share(tops), in_time.even_share(tops), hit_rate
            other = interleaved.share(tops)
            coverage.append(TopCoverage(percent, sum(tops), *shares, interleaved_share=other))
        return Skew(
            layer=number,
            expert_count=len(counts),
            never_count=never_count if self._experts.are_known else None,
            selection_count=int(counts.sum()),
            entropy=entropy(counts),
            gini=gini(counts),
            coverage=tuple(coverage),
        )

    def _hit_rate(self, layers: Sequence[LayerCounts], tops: Sequence[int]) -> float | None:
        capacities = {layer.number: top for layer, top in zip(layers, tops, strict=True)}
        return self._lru.hit_rate(capacities)


def read_sample(paths: Sequence[str], options: ReadOptions = ReadOptions()) -> RoutingSample:
    """Read traces, imatrices and hotness files together. Raises what reading them raises."""
    sample = RoutingSample(options.shape)
    sample.path = paths[0] if paths else None
    sample.warnings = feed(paths, options, sample.add)
    return sample


def concentration(
    paths: PathOrPaths,
    options: ReadOptions = ReadOptions(),
    *,
    model: TracedModel | None = None,
) -> Concentration:
    """Judge traces, imatrices and hotness files together.

    `model` (a source, a pack, open or not, or a shape) says how many experts there are. Raises
    TraceError for what is wrong in a file, and where nothing was chosen.
    """
    return read_sample(path_texts(paths, "paths"), options_of(options, model)).concentration()


def _tops(layers: Sequence[LayerCounts], percent: int) -> list[int]:
    return top_counts((layer.expert_count for layer in layers), percent)


def _not_stated(expert_count: int) -> str:
    return (
        f"the files do not say how many experts a layer has: {expert_count} are assumed, one more "
        "than the highest number that was chosen; `model` says it"
    )


def _sides(layers: Sequence[LayerCounts]) -> list[tuple[Ints, Ints]]:
    return [(layer.learned, layer.measured) for layer in layers]
