"""The hotness that orders a pack, and that of its blobs by the counts of experts."""

import os
from collections.abc import Sequence

from moepack.common.shape import CHUNK_FAMILY, ROUTED_FAMILY, ExpertKey, ModelShape
from moepack.pack.format.tables import PackedFamily
from moepack.source.experts import SourceFamily
from moepack.traces.hotness.model import Hotness

Family = SourceFamily | PackedFamily


def load_hotness(
    hotness: str | os.PathLike[str] | Hotness | None, shape: ModelShape
) -> Hotness | None:
    """Return the hotness to pack with. Raises TraceError if it is another model's."""
    if hotness is None:
        return None
    if not isinstance(hotness, Hotness):
        from moepack.traces.hotness import measure  # here, since it brings numpy

        hotness = measure.load(os.fspath(hotness), shape)
    hotness.check_fits(shape)
    return hotness


def family_counts(families: Sequence[Family], hotness: Hotness | None) -> list[list[int] | None]:
    """Return the hotness of the experts of each family; None for one that is not measured.

    A chunk expert has the sum of the experts that it serves, if their number tells which they are.
    """
    routed = {f.layer: f.expert_count for f in families if f.name == ROUTED_FAMILY}
    if hotness is None:
        return [None] * len(families)
    layers = {layer for layer, _ in hotness.counts}
    return [
        _counts(family, routed.get(family.layer, 1), hotness) if family.layer in layers else None
        for family in families
    ]


def _counts(family: Family, routed_count: int, hotness: Hotness) -> list[int] | None:
    experts = range(family.expert_count)
    if family.name == ROUTED_FAMILY:
        return [hotness.counts.get(ExpertKey(family.layer, expert), 0) for expert in experts]
    size, rest = divmod(routed_count, family.expert_count)
    if family.name != CHUNK_FAMILY or rest:
        return None
    return [hotness.chunk_count(family.layer, expert, size) for expert in experts]
