"""The plan: which blob lies in which file at which offset. Pure: no file is opened.

A million blobs must fit, so a blob is three numbers here; what is the same for all experts of a
family (parts, offsets inside the blob, length) stands once, in its template.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moepack.errors import RequestError
from moepack.format import records
from moepack.format.names import projection
from moepack.packing.layout import Layout
from moepack.sizes import align
from moepack.source.experts import Experts, Family, Part

_SUFFIXES = ("weight", "bias", "scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Template:
    """How a blob of one family looks: parts in order, their offsets in it, its padded length."""

    family: Family
    parts: tuple[Part, ...]
    offsets_in_blob: tuple[int, ...]
    length: int
    first_blob: int
    first_part: int
    hotness_measured: bool

    @property
    def payload_length(self) -> int:
        """The bytes of all parts of one blob, without padding."""
        return sum(part.length for part in self.parts)


class PlannedBlob(NamedTuple):
    """One blob: the number of its template, its expert, its offset from the start of its file."""

    template: int
    expert: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One data file: its blobs in the order of their offsets, and its length in bytes."""

    name: str
    length: int
    blobs: tuple[PlannedBlob, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pack will be. `order` holds (template number, expert), hottest first."""

    layout: Layout
    templates: tuple[Template, ...]
    files: tuple[PlannedFile, ...]
    order: tuple[tuple[int, int], ...]
    counts: Mapping[tuple[int, int], int]

    @property
    def data_length(self) -> int:
        """The bytes of all data files."""
        return sum(file.length for file in self.files)

    @property
    def payload_length(self) -> int:
        """The bytes of all parts, without padding."""
        return sum(t.payload_length * t.family.expert_count for t in self.templates)

    @property
    def index_length(self) -> int:
        """The bytes of index.bin."""
        kinds = sum(len(t.parts) for t in self.templates)
        parts = sum(len(t.parts) * t.family.expert_count for t in self.templates)
        counts = (len(self.files), len(self.templates), kinds, len(self.order), parts)
        return records.section_offsets(*counts)[-1]

    def part_numbers(self, file: PlannedFile) -> Iterator[range]:
        """Yield the part numbers of each blob of `file`, in the order of the blobs."""
        for blob in file.blobs:
            template = self.templates[blob.template]
            first = template.first_part + blob.expert * len(template.parts)
            yield range(first, first + len(template.parts))


def make(
    experts: Experts,
    layout: Layout,
    *,
    counts: Mapping[tuple[int, int], int] | None = None,
    layers: Sequence[int] | None = None,
) -> Plan:
    """Plan a pack of `experts` (all layers, or those in `layers`) in `layout`.

    `counts` is the hotness by (layer, expert); without it the order is the source's. A layer that
    it does not name at all was not measured, and comes last. Raises RequestError for a layer
    without experts and for a pack beyond the limits of the format.
    """
    families = _select(experts, layers)
    counts = counts or {}
    templates = _templates(families, layout, {layer for layer, _ in counts})
    hotness = {
        (number, expert): _count(template.family, experts, counts, expert)
        for number, template in enumerate(templates)
        if template.hotness_measured
        for expert in range(template.family.expert_count)
    }
    in_source = [
        (number, expert)
        for number, template in enumerate(templates)
        for expert in range(template.family.expert_count)
    ]
    # Sorting is stable: experts of equal hotness, and those not measured, keep the source's order.
    order = sorted(in_source, key=lambda blob: -hotness.get(blob, -1))
    physical = order if layout.order == "hotness" else in_source
    group = _by_layer if layout.group == "layer" else _by_size
    files = tuple(group(physical, templates, layout))
    plan = Plan(layout, templates, files, tuple(order), hotness)
    _check_limits(plan)
    return plan


def _select(experts: Experts, layers: Sequence[int] | None) -> list[Family]:
    if layers is None:
        return list(experts.families)
    for layer in layers:
        if layer not in experts.layers:
            held = ", ".join(map(str, experts.layers[:64]))
            raise RequestError(f"layer {layer} has no experts", expected=f"one of {held}")
    return [family for family in experts.families if family.layer in set(layers)]


def _count(
    family: Family, experts: Experts, counts: Mapping[tuple[int, int], int], expert: int
) -> int:
    """Give the hotness of one expert; a chunk's is that of the experts that it serves.

    In grovemoe, chunk C belongs to experts C * G to C * G + G - 1, and is used when one of them is.
    The sum counts a token twice that chose two of them: an upper bound.
    """
    if family.name == "ffn_exps":
        return counts.get((family.layer, expert), 0)
    main = next(f for f in experts.families if f.layer == family.layer)
    group = main.expert_count // family.expert_count
    return sum(counts.get((family.layer, expert * group + n), 0) for n in range(group))


def _templates(
    families: list[Family], layout: Layout, measured_layers: set[int]
) -> tuple[Template, ...]:
    templates: list[Template] = []
    main_counts = {f.layer: f.expert_count for f in families if f.name == "ffn_exps"}
    blob = part = 0
    for family in families:
        parts = tuple(sorted(family.parts, key=lambda part: _part_order(part, layout)))
        offsets, length = _offsets(parts, layout)
        divides = family.name == "ffn_exps" or (
            family.name == "ffn_chexps"
            and main_counts.get(family.layer, 1) % family.expert_count == 0
        )
        measured = family.layer in measured_layers and divides
        templates.append(Template(family, parts, offsets, length, blob, part, measured))
        blob += family.expert_count
        part += family.expert_count * len(parts)
    return tuple(templates)


def _part_order(part: Part, layout: Layout) -> tuple[bool, int, int]:
    suffix = part.name.partition(".")[2]
    place = layout.projections.index(projection(part.name))
    return not part.is_weight, place, _SUFFIXES.index(suffix)


def _offsets(parts: Sequence[Part], layout: Layout) -> tuple[tuple[int, ...], int]:
    """Place the parts of one blob: weights aligned, small parts together behind them."""
    offsets = []
    position = 0
    small_before = False
    for part in parts:
        shares = small_before and not part.is_weight
        position = align(position, layout.small_alignment if shares else layout.part_alignment)
        offsets.append(position)
        position += part.length
        small_before = not part.is_weight
    return tuple(offsets), align(position, layout.blob_alignment)


def _by_layer(
    order: Sequence[tuple[int, int]], templates: Sequence[Template], layout: Layout
) -> Iterator[PlannedFile]:
    layers: dict[int, list[tuple[int, int]]] = {t.family.layer: [] for t in templates}
    for blob in order:
        layers[templates[blob[0]].family.layer].append(blob)
    for layer, blobs in layers.items():
        yield _file(layout.file_named(layer), blobs, templates)


def _by_size(
    order: Sequence[tuple[int, int]], templates: Sequence[Template], layout: Layout
) -> Iterator[PlannedFile]:
    assert layout.max_length is not None
    number = length = 0
    blobs: list[tuple[int, int]] = []
    for blob in order:
        blob_length = templates[blob[0]].length
        if blobs and length + blob_length > layout.max_length:
            yield _file(layout.file_named(number), blobs, templates)
            number, length, blobs = number + 1, 0, []
        blobs.append(blob)
        length += blob_length
    yield _file(layout.file_named(number), blobs, templates)


def _file(
    name: str, blobs: Sequence[tuple[int, int]], templates: Sequence[Template]
) -> PlannedFile:
    planned = []
    offset = 0
    for template, expert in blobs:
        planned.append(PlannedBlob(template, expert, offset))
        offset += templates[template].length
    return PlannedFile(name, offset, tuple(planned))


def _check_limits(plan: Plan) -> None:
    limits = (
        ("files", len(plan.files), records.MAX_FILES),
        ("families", len(plan.templates), records.MAX_FAMILIES),
        ("part kinds", sum(len(t.parts) for t in plan.templates), records.MAX_PART_KINDS),
        ("blobs", len(plan.order), records.MAX_BLOBS),
        ("bytes", plan.data_length, records.MAX_LENGTH),
    )
    for what, count, limit in limits:
        if count > limit:
            raise RequestError(f"the pack would have too many {what}", expected=limit, found=count)


def _order(plan: Plan) -> str:
    measured = any(template.hotness_measured for template in plan.templates)
    return "hotness" if measured and plan.layout.order == "hotness" else "source"


def describe(plan: Plan) -> dict[str, Any]:
    """Give the plan's figures as plain values; lengths in bytes."""
    data_length = plan.data_length
    return {
        "layout": plan.layout.name,
        "order": _order(plan),
        "layers": sorted({template.family.layer for template in plan.templates}),
        "blob_count": len(plan.order),
        "file_count": len(plan.files),
        "files": [{"name": file.name, "length": file.length} for file in plan.files],
        "index_length": plan.index_length,
        "data_length": data_length,
        "payload_length": plan.payload_length,
        "padding_length": data_length - plan.payload_length,
        "padding_share": (data_length - plan.payload_length) / data_length,
    }
