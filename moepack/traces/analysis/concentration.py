"""The concentration of traces: whether routers prefer some experts so much that pinning pays.

Apparent skew grows as samples shrink. So the top experts are ranked on the earlier half of a trace
and their coverage is measured on the later one, beside that of a uniform router with as many
tokens.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.shape import ModelShape
from moepack.traces.analysis.gate import (
    CURVE_POINTS,
    GATE_PERCENT,
    Division,
    LayerCounts,
    coverage_curve,
    entropy,
    explain,
    gini,
    judge,
)
from moepack.traces.formats.reading import AnyTrace, TracedModel, opened
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness.counter import Half, Halves, SelectionCounter
from moepack.traces.model import Ints, Item, Origin
from moepack.traces.simulation.curves import LayerLru
from moepack.traces.steps import DECODE_PHASES

TOP_PERCENTS = (5, 10, 25, 50)


@dataclass(frozen=True, slots=True)
class TopCoverage:
    """The `share` of the later half that the top `percent` of the experts cover; None without one.

    `even_share` is that of a uniform router; `latest_share` is the hit rate of an LRU cache of as
    many experts of each layer, None if a token uses more than that.
    """

    percent: int
    expert_count: int
    share: float | None
    even_share: float | None
    latest_share: float | None


@dataclass(frozen=True, slots=True)
class Skew:
    """How uneven one layer is, or all (`layer` None). Entropy 1 and Gini 0 are even.

    `never_count` is None if the number of experts is unknown.
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
    """The skews of all layers together and of each, and the verdict that follows from them.

    `has_expert_counts` is whether the model or the files state the experts of each layer; if not,
    they are assumed to be one more than the highest number selected in any. `halves` is the rule of
    division: `time`. `warnings` counts what was left out of the files, by problem.
    """

    token_count: int | None
    request_count: int | None
    has_expert_counts: bool
    halves: str | None
    total: Skew
    layers: tuple[Skew, ...]
    verdict: str
    reason: str
    warnings: Counter[str] = field(default_factory=Counter)


class StatedExperts:
    """Collects the origins of all files of a trace, which are of one model.

    `expert_counts` are the model's own, by layer; they overrule the origins.
    """

    def __init__(self, expert_counts: Mapping[int, int] | None = None) -> None:
        self._is_model = expert_counts is not None
        self._by_layer = dict(expert_counts or {})
        self._each: int | None = None
        """The experts of each layer that has any."""

    @property
    def are_known(self) -> bool:
        """Whether a model or an origin stated the numbers."""
        return self._is_model or bool(self._by_layer) or self._each is not None

    def add(self, origin: Origin) -> None:
        """Add the next origin. Raises TraceError, without a path, if it contradicts the others."""
        if self._is_model:
            return
        for layer, count in (origin.expert_counts or {}).items():
            _expect(self._by_layer.setdefault(layer, count), count, f"layer {layer}")
        each = self._each = self._each or origin.expert_count
        if each is not None:
            _expect(each, origin.expert_count or each, None)
            _expect(max(self._by_layer.values(), default=each), each, None)

    def by_layer(self, layer: Ints, expert: Ints) -> dict[int, int]:
        """Return the number of experts of each layer.

        `layer` and `expert` [experts] are all that were selected. If nothing is stated, each layer
        has one more than the highest of all. Raises TraceError for an expert beyond a stated
        number.
        """
        if self._is_model or not len(layer):
            return dict(self._by_layer)
        most = self._each or max(self._by_layer.values(), default=int(expert.max()) + 1)
        counts = dict.fromkeys(np.unique(layer).tolist(), most) | self._by_layer
        bounds = np.array([counts[number] for number in layer.tolist()])
        if np.any(wrong := expert >= bounds):
            first = int(np.argmax(wrong))
            expected = f"experts below {bounds[first]}"
            raise _different(f"layer {layer[first]}", expected, f"expert {expert[first]}")
        return counts


class RoutingSample:
    """A sample of routing to be judged: counts, their halves, and the hit rates of LRU caches.

    Prefill is left out, unless there is nothing else, as in an imatrix. `shape` is the model's;
    without it layers have the experts that files state, or else as many as the highest number that
    any selection has.
    """

    def __init__(self, shape: ModelShape | None = None) -> None:
        self._experts = StatedExperts(shape and shape.expert_counts)
        self._everything, self._decode = SelectionCounter(), SelectionCounter(DECODE_PHASES)
        self._lru = LayerLru()
        self.path: str | None = None
        """The first file, for messages."""
        self.warnings: Counter[str] = Counter()

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        if isinstance(item, Origin):
            self._experts.add(item)
        self._everything.add(item)
        self._decode.add(item)
        self._lru.add(item)

    @property
    def _counter(self) -> SelectionCounter:
        return self._decode if self._decode.selection_count else self._everything

    def concentration(self) -> Concentration:
        """Judge the sample. Raises TraceError if it has no selections."""
        counter = self._counter
        if not counter.selection_count:
            raise TraceError("nothing was counted", path=self.path, hint="it has no selections")
        halves = counter.halves()
        divided = self._divided(halves)
        evidence = divided.evidence()
        hit_rate = self._hit_rate(divided.layers, divided.tops(GATE_PERCENT))
        reason = explain(evidence, hit_rate)
        if not self._experts.are_known:
            reason += (
                f"; the files do not say how many experts a layer has: {counter.places.width} are "
                "assumed, one more than the highest number that was selected; `model` says it"
            )
        return Concentration(
            token_count=counter.stated_token_count,
            request_count=None if counter.loose_count else counter.steps.request_count,
            has_expert_counts=self._experts.are_known,
            halves="time" if halves else None,
            total=self._skew(None, divided),
            layers=tuple(
                self._skew(one.number, divided._replace(layers=[one])) for one in divided.layers
            ),
            verdict=judge(evidence, hit_rate),
            reason=reason,
            warnings=self.warnings,
        )

    def count_table(self) -> tuple[tuple[int, ...], Ints]:
        """Return the layers, and the counts of their experts [layers, experts].

        A layer with fewer experts than others has -1 in place of those that it lacks.
        """
        layers = self._divided(None).layers
        width = max((len(layer.counts) for layer in layers), default=0)
        table = np.full((len(layers), width), -1, np.int64)
        for row, layer in zip(table, layers, strict=True):
            row[: len(layer.counts)] = layer.counts
        return tuple(layer.number for layer in layers), table

    def heat_table(self) -> tuple[tuple[int, ...], NDArray[np.float64]]:
        """Return the layers, and their counts, hottest first, as multiples of a uniform share."""
        layers, counts = self.count_table()
        table = np.sort(np.maximum(counts, 0))[:, ::-1]
        return layers, table / np.maximum(table.mean(axis=1, keepdims=True), 1e-9)

    def curves(self) -> dict[str, list[float]]:
        """Return the shares that the top experts cover, by their share in steps of 2 %."""
        halves = self._counter.halves()
        layers = self._divided(halves).layers
        if halves is None:
            counts = [(layer.counts, layer.counts) for layer in layers]
            return {"ranked and measured on the same": coverage_curve(counts)}
        same = [(layer.measured, layer.measured) for layer in layers]
        halved = [(layer.learned, layer.measured) for layer in layers]
        curves = {
            "ranked and measured on the later half (looks better)": coverage_curve(same),
            "learned on the earlier half, measured on the later": coverage_curve(halved),
            "uniform router": np.linspace(0, 1, CURVE_POINTS).tolist(),
        }
        if self._lru.token_count:
            shares = np.linspace(0, 1, CURVE_POINTS).tolist()
            sizes = [[round(len(layer.counts) * share) for layer in layers] for share in shares]
            rates = [self._hit_rate(layers, size) for size in sizes]
            curves["LRU cache"] = [math.nan if rate is None else rate for rate in rates]
        return curves

    def _divided(self, halves: Halves | None) -> Division:
        places, counts = self._counter.places, self._counter.counts
        expert_counts = self._experts.by_layer(*places.keys(np.flatnonzero(counts)))
        nobody = Half(0, np.zeros(0, np.int64))
        learned, measured = (halves.learned, halves.measured) if halves else (nobody, nobody)
        columns = counts, learned.counts, measured.counts
        layers = [
            LayerCounts(layer, *(places.row(column, layer, size) for column in columns))
            for layer, size in sorted(expert_counts.items())
        ]
        return Division(layers, learned.token_count, measured.token_count)

    def _skew(self, number: int | None, divided: Division) -> Skew:
        counts = np.concatenate([layer.counts for layer in divided.layers])
        never_count = len(counts) - int(np.count_nonzero(counts))
        coverage = []
        for percent in TOP_PERCENTS:
            tops = divided.tops(percent)
            coverage.append(
                TopCoverage(
                    percent,
                    sum(tops),
                    divided.share(tops),
                    divided.uniform_share(tops),
                    self._hit_rate(divided.layers, tops),
                )
            )
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


def read_sample(
    paths: AnyTrace, options: ReadOptions = ReadOptions(), model: TracedModel | None = None
) -> RoutingSample:
    """Read traces, imatrices and hotness files together. Raises the errors of reading them."""
    trace = opened(paths, options, model)
    sample = RoutingSample(trace.shape)
    sample.path = trace.paths[0]
    sample.warnings = trace.feed(sample.add)
    return sample


def concentration(
    paths: AnyTrace, options: ReadOptions = ReadOptions(), *, model: TracedModel | None = None
) -> Concentration:
    """Judge traces, imatrices and hotness files together.

    `paths` are files, or what `read_trace` returned. `model` (a source, a pack, open or not, or a
    shape) gives the number of experts. Raises TraceError for faults in a file, and if there are no
    selections.
    """
    return read_sample(paths, options, model).concentration()


def _expect(expected: int, actual: int, place: str | None) -> None:
    if actual != expected:
        raise _different(place, f"{expected} experts", str(actual))


def _different(place: str | None, expected: str, actual: str) -> TraceError:
    hint = "only traces of one model can be judged together"
    return TraceError(
        "traces of different models", place=place, expected=expected, found=actual, hint=hint
    )
