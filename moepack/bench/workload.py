"""The routed reads of a model: which experts each token needs, layer by layer.

The experts of one layer are known together, and the next layer's only when these have been read.
Taken from a trace, or drawn from hotness where there is none.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moepack.errors import TraceError
from moepack.keys import ExpertKey
from moepack.shape import ModelShape
from moepack.trace.formats import registry
from moepack.trace.steps import ALL_PHASES, StepStream
from moepack.trace.validation import Checks

USUAL_EXPERTS_USED = 8


class RoutedLayer(NamedTuple):
    """The experts that one token needs in one layer."""

    layer: int
    experts: tuple[int, ...]


class Workload(NamedTuple):
    """Routed layers in the order in which an engine meets them, and where they came from."""

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
        steps = stream.take(item)
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
    chosen: dict[int, dict[int, None]] = {}
    for layer, expert in zip(layers, experts, strict=True):
        chosen.setdefault(layer, {})[expert] = None
    for layer, unique in sorted(chosen.items()):
        yield RoutedLayer(layer, tuple(unique))


def from_counts(
    counts: Mapping[ExpertKey, int],
    shape: ModelShape,
    experts_used: int,
    token_count: int,
    origin: str,
) -> Workload:
    """Draw tokens: `experts_used` different experts a layer, in proportion to their counts.

    Without any counts all experts are alike. The same arguments give the same workload.
    """
    draw = random.Random(0)
    layers = []
    for _, (layer, count) in itertools.product(range(token_count), shape.expert_counts.items()):
        weights = [counts.get(ExpertKey(layer, expert), 0) for expert in range(count)]
        layers.append(RoutedLayer(layer, _sample(weights, min(experts_used, count), draw)))
    return Workload(layers, token_count, origin)


def _sample(weights: Sequence[int], count: int, draw: random.Random) -> tuple[int, ...]:
    """Draw without putting back (Efraimidis and Spirakis 2006): the highest random ^ (1/weight).

    What has no weight comes last.
    """
    keys = [(draw.random() ** (1 / weight) if weight else draw.random() - 1) for weight in weights]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count])
