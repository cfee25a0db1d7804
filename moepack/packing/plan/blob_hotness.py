"""The hotness that orders a pack, and that of a blob by the counts of experts."""

import os

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


def is_measured(family: Family, routed_count: int | None, hotness: Hotness | None) -> bool:
    """Return whether hotness has counts for the experts of a family.

    `routed_count` is the number of experts in the layer's routed family. Chunk experts are counted
    if `routed_count` tells which experts they serve.
    """
    if hotness is None or not any(layer == family.layer for layer, _ in hotness.counts):
        return False
    if family.name == ROUTED_FAMILY:
        return True
    return family.name == CHUNK_FAMILY and (routed_count or 1) % family.expert_count == 0


def count_of(family: Family, routed_count: int | None, hotness: Hotness, expert: int) -> int:
    """Return the hotness of one expert, or the sum over a chunk expert's experts."""
    if family.name == ROUTED_FAMILY:
        return hotness.counts.get(ExpertKey(family.layer, expert), 0)
    size = (routed_count or 1) // family.expert_count
    return hotness.chunk_count(family.layer, expert, size)
