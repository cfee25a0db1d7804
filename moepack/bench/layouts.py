"""The same experts in the same order, as blobs of a pack and as slices of its shards.

Slices hold the bytes of the parts, so that the pack's digests prove them as well.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from moepack.bench.workload import RoutedLayer
from moepack.common.errors import RequestError
from moepack.pack.reading.expert_read import ExpertRead
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.read_plan import plan_read, read_of_parts
from moepack.source.experts import SourceFamily, find_experts
from moepack.source.shards import Source

Groups = Sequence[Sequence[ExpertRead]]
"""Experts by routed layer; all experts of a layer are requested together."""


def blobs(pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as one blob of the pack."""
    return _experts(layers, lambda layer, expert: plan_read(pack, layer, expert, None, None))


def slices(source: Source, pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as its slices in the shards, one read each, even if they are adjacent.

    Raises RequestError if the pack was not made from this source.
    """
    # Reversed, so that a layer's main family, which comes first, is the one that stays.
    families = {family.layer: family for family in reversed(find_experts(source).families)}
    for layer in {routed.layer for routed in layers}:
        _check_same(pack, layer, families.get(layer))
    paths = [Path(shard.path) for shard in source.shards]

    def plan(layer: int, expert: int) -> ExpertRead:
        parts = []
        for one in families[layer].parts:
            shard, offset = one.slices.at(expert)
            part = pack.locate(layer, expert, one.name)
            parts.append(part._replace(path=paths[shard], offset=offset))
        return read_of_parts(layer, expert, parts, pack.part_names(layer), gap=0)

    return _experts(layers, plan)


def _experts(layers: Sequence[RoutedLayer], plan: Callable[[int, int], ExpertRead]) -> Groups:
    return [[plan(layer, expert) for expert in numbers] for layer, numbers in layers]


def _check_same(pack: Pack, layer: int, family: SourceFamily | None) -> None:
    ours = {(kind.name, kind.length) for kind in pack.parts(layer)}
    theirs = {(part.name, part.length) for part in family.parts} if family else set()
    if ours != theirs or (family and family.expert_count != pack.expert_count(layer)):
        texts = [
            ", ".join(f"{name} of {length:,} bytes" for name, length in sorted(parts)) or "none"
            for parts in (ours, theirs)
        ]
        raise RequestError(
            "the pack was not made from this source",
            path=pack.path,
            place=f"layer {layer}",
            expected=texts[0],
            found=texts[1],
        )
