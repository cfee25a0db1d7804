"""Where each part of each expert belongs in the memory that llama.cpp reads experts from."""

from collections.abc import Mapping

from moepack.engines.gguf_layout import GgufLayout
from moepack.errors import PackError
from moepack.format.tables import PackedFamily
from moepack.keys import ExpertKey
from moepack.reading.pack import Pack
from moepack.running.expert_memory import Span

Places = Mapping[str, Span]
"""By the names of an expert's parts; spans count from the start of the experts' memory."""


def find_places(pack: Pack, layout: GgufLayout) -> dict[str, dict[ExpertKey, Places]]:
    """Find the places of all experts that llama.cpp uses, by the name of their family.

    Raises PackError for experts that are tensors of their own in the source: llama.cpp does not run
    such models any more.
    """
    starts = {tensor.name: tensor.extents for tensor in layout.experts}
    layers = pack.shape.without_mtp().layers
    found: dict[str, dict[ExpertKey, Places]] = {}
    for family in pack.index.families:
        if family.layer not in layers:
            continue
        _check_stacked(pack, family)
        extents = [starts[f"blk.{family.layer}.{kind.name}"] for kind in family.part_kinds]
        places = found.setdefault(family.name, {})
        for expert in range(family.expert_count):
            places[ExpertKey(family.layer, expert)] = {
                kind.name: Span(slices[expert].offset - layout.experts_offset, kind.length)
                for kind, slices in zip(family.part_kinds, extents, strict=True)
            }
    return found


def length_of(places: Places) -> int:
    """Return the bytes of an expert's parts."""
    return sum(span.length for span in places.values())


def _check_stacked(pack: Pack, family: PackedFamily) -> None:
    if any(kind.origin.first_slice is not None for kind in family.part_kinds):
        raise PackError(
            "each expert is a tensor of its own, as in GGUFs before April 2024",
            path=pack.path,
            place=f"layer {family.layer}",
            hint="convert the model anew: llama.cpp does not run such files any more",
        )
