"""The routed reads of a model: the experts of each token, layer by layer.

The experts of one layer are requested together, and the next layer's only when these have been
read. They are taken from a trace, or drawn by hotness; and read as blobs of a pack, or in the same
order as slices of its shards. Slices hold the bytes of the parts, so that the pack's digests prove
them as well.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey, ModelShape
from moepack.pack.reading.expert_read import ExpertRead, plan_read, read_of_parts
from moepack.pack.reading.pack import Pack
from moepack.traces.formats.routing import open_trace

USUAL_EXPERTS_USED = 8

Groups = Sequence[Sequence[ExpertRead]]
"""Experts by routed layer; all experts of a layer are requested together."""


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

    Raises what `Trace.tokens` raises.
    """
    tokens = list(itertools.islice(open_trace(path, model=shape).tokens(), token_count))
    layers = [
        RoutedLayer(layer, tuple(expert for expert in experts if expert >= 0))
        for token in tokens
        for layer, experts in zip(token.layers.tolist(), token.experts.tolist(), strict=True)
    ]
    return Workload(layers, len(tokens), f"trace {path}")


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


def blobs(pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as one blob of the pack."""
    return _experts(layers, lambda layer, expert: plan_read(pack, layer, expert, None, None))


def slices(shards: Pack, pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as its slices in the shards, one read each, even if they are adjacent.

    Raises RequestError if the pack was not made from these shards.
    """
    for layer in {routed.layer for routed in layers}:
        _check_same(pack, shards, layer)

    def plan(layer: int, expert: int) -> ExpertRead:
        parts = []
        for kind in pack.parts(layer):
            here = shards.locate(layer, expert, kind.name)
            part = pack.locate(layer, expert, kind.name)
            parts.append(part._replace(path=here.path, offset=here.offset))
        return read_of_parts(layer, expert, parts, pack.part_names(layer), gap=0)

    return _experts(layers, plan)


def _experts(layers: Sequence[RoutedLayer], plan: Callable[[int, int], ExpertRead]) -> Groups:
    return [[plan(layer, expert) for expert in numbers] for layer, numbers in layers]


def _check_same(pack: Pack, shards: Pack, layer: int) -> None:
    ours, theirs = (
        {(kind.name, kind.length) for kind in one.parts(layer)}
        if layer in one.shape.routed
        else set()
        for one in (pack, shards)
    )
    if ours != theirs or shards.expert_count(layer) != pack.expert_count(layer):
        problem = "the pack was not made from this source"
        raise RequestError(problem, path=pack.path, place=f"layer {layer}")
