"""The routed reads of a model: the experts of each token, layer by layer.

The experts of one layer are requested together, and the next layer's only when these have been
read. They are taken from a trace, or drawn by hotness.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey, ModelShape
from moepack.traces.formats import registry
from moepack.traces.steps import ALL_PHASES, StepStream
from moepack.traces.validation import Checks

USUAL_EXPERTS_USED = 8


class RoutedLayer(NamedTuple):
    """The experts of one token in one layer."""

    layer: int
    experts: tuple[int, ...]


class Workload(NamedTuple):
    """Routed layers in the order of an engine, and their origin."""

    layers: list[RoutedLayer]
    token_count: int
    origin: str


def from_trace(path: str, shape: ModelShape, token_count: int) -> Workload:
    """Return the first tokens of a trace of any format, which was taken on a model of `shape`.

    Raises what `registry.read` raises, and TraceError for a trace without single tokens.
    """
    layers: list[RoutedLayer] = []
    stream = StepStream(ALL_PHASES, token_count)
    for item in registry.read(path, Checks(path, shape)):
        steps = stream.add(item)
        if steps is None:
            continue
        for first, last in itertools.pairwise(steps.starts):
            layers += _by_layer(steps.layer[first:last].tolist(), steps.expert[first:last].tolist())
        if stream.is_full:
            break
    if not layers:
        raise TraceError("no tokens in it", path=path, hint="counts alone are for `hotness`")
    return Workload(layers, stream.token_count, f"trace {path}")


def _by_layer(layers: list[int], experts: list[int]) -> Iterator[RoutedLayer]:
    """Yield a token's selections by layer, each expert once, in the order of the selections."""
    by_layer: dict[int, dict[int, None]] = {}
    for layer, expert in zip(layers, experts, strict=True):
        by_layer.setdefault(layer, {})[expert] = None
    for layer, unique in sorted(by_layer.items()):
        yield RoutedLayer(layer, tuple(unique))


def from_counts(
    counts: Mapping[ExpertKey, int],
    shape: ModelShape,
    experts_used: int,
    token_count: int,
    origin: str,
) -> Workload:
    """Draw tokens: `experts_used` different experts a layer, in proportion to their counts.

    Without any counts experts are equally likely. The same arguments give the same workload.
    """
    draw = random.Random(0)
    layers = []
    for _, (layer, count) in itertools.product(range(token_count), shape.expert_counts.items()):
        weights = [counts.get(ExpertKey(layer, expert), 0) for expert in range(count)]
        layers.append(RoutedLayer(layer, _sample(weights, min(experts_used, count), draw)))
    return Workload(layers, token_count, origin)


def _sample(weights: Sequence[int], count: int, draw: random.Random) -> tuple[int, ...]:
    """Draw without replacement (Efraimidis and Spirakis 2006): the highest random^(1/weight).

    Experts without weight come last.
    """
    keys = [(draw.random() ** (1 / weight) if weight else draw.random() - 1) for weight in weights]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count])
