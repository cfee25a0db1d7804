"""The plan: the files of a pack, and the blobs in each. Pure: no file is opened.

A million blobs must fit, so a blob is two numbers here; parts, offsets inside the blob and length
are the same for all experts of a family, and stand once, in its template.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import align
from moepack.pack.format import records, sections
from moepack.pack.format.names import projection
from moepack.packing.plan.blob_hotness import count_of, is_measured
from moepack.packing.plan.layout import Layout
from moepack.source.dense import Dense, ShardRange
from moepack.source.experts import Experts, Scattered, SourceFamily, SourcePart
from moepack.source.shards import SourceTensor
from moepack.storage.extents import Extent, NewFile
from moepack.traces.hotness.model import Hotness

_SUFFIXES = ("weight", "bias", "scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Template:
    """How a blob of one family looks: parts in order, their offsets in it, its padded length."""

    family: SourceFamily
    parts: tuple[SourcePart, ...]
    offsets_in_blob: tuple[int, ...]
    length: int
    first_blob: int
    first_part: int
    hotness_measured: bool


class BlobKey(NamedTuple):
    """A blob by the number of its template and its expert there."""

    template: int
    expert: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One data file: its blobs, one behind the other, and its length in bytes."""

    name: str
    length: int
    blobs: tuple[BlobKey, ...]


DENSE_NAME = "dense.bin"
"""The file that holds the dense part."""


@dataclass(frozen=True, slots=True)
class PlannedDense:
    """The file of the dense part: each tensor and each other range of a shard with its offset."""

    tensors: tuple[tuple[SourceTensor, int], ...]
    other_ranges: tuple[tuple[ShardRange, int], ...]
    length: int

    def extents(self) -> Iterator[Extent]:
        """Yield the ranges to copy, in the order of offsets: other ranges, then tensors."""
        for (shard, shard_offset, length), offset in self.other_ranges:
            yield Extent(offset, length, shard, shard_offset)
        for (shard, tensor), offset in self.tensors:
            yield Extent(offset, tensor.length, shard, tensor.offset)


@dataclass(frozen=True, slots=True)
class Plan:
    """A pack that is not written yet.

    `order` holds all blobs, the hottest first, and `counts` how often routers selected those that
    were measured. `hotness` is where the counts came from; `layers` are the packed ones, None for
    all. `dense` is None if experts alone are packed.
    """

    layout: Layout
    templates: tuple[Template, ...]
    files: tuple[PlannedFile, ...]
    order: tuple[BlobKey, ...]
    counts: Mapping[BlobKey, int]
    dense: PlannedDense | None = None
    hotness: Hotness | None = None
    layers: tuple[int, ...] | None = None

    @property
    def source_layers(self) -> tuple[int, ...]:
        """The layers that are packed, ascending."""
        return tuple(sorted({template.family.layer for template in self.templates}))

    @property
    def sorted_by(self) -> str:
        """The order of blobs on disk: `hotness`, if that was measured, or `source`."""
        measured = any(template.hotness_measured for template in self.templates)
        return "hotness" if measured and self.layout.order == "hotness" else "source"

    @property
    def is_whole(self) -> bool:
        """Whether the pack will hold all of the source."""
        return self.dense is not None and self.layers is None

    @property
    def data_length(self) -> int:
        """The bytes of all data files; with a codec an upper bound."""
        return sum(file.length for file in self.new_files())

    @property
    def expert_length(self) -> int:
        """The bytes of all parts, without padding."""
        return sum(
            part.length * template.family.expert_count
            for template in self.templates
            for part in template.parts
        )

    @property
    def dense_length(self) -> int | None:
        """The bytes of all dense tensors, without padding; None if they are not packed."""
        if self.dense is None:
            return None
        return sum(tensor.length for (_, tensor), _ in self.dense.tensors)

    @property
    def payload_length(self) -> int:
        """The bytes that come from the source."""
        others = self.dense.other_ranges if self.dense else ()
        other_length = sum(shard_range.length for shard_range, _ in others)
        return self.expert_length + (self.dense_length or 0) + other_length

    @property
    def measured_blob_count(self) -> int | None:
        """How many blobs the hotness covers; None without hotness."""
        return None if self.hotness is None else len(self.counts)

    def hotness_to_json(self) -> dict[str, Any] | None:
        """Return the hotness as the manifest states it; None without hotness."""
        if self.hotness is None:
            return None
        counts = {"measured_blob_count": self.measured_blob_count, "blob_count": len(self.order)}
        return self.hotness.to_json() | counts

    @property
    def index_length(self) -> int:
        """The bytes of index.bin; with a codec an upper bound."""
        has_codecs = self.layout.codec is not None
        return self.directory(len(self.new_files()), has_codecs).index_length

    def directory(self, file_count: int, has_codecs: bool = False) -> sections.Directory:
        """Return the positions of the sections of an index of so many files.

        With `has_codecs` some parts are stored by a codec.
        """
        kinds = [part for template in self.templates for part in template.parts]
        counts = {
            "files": file_count,
            "families": len(self.templates),
            "part_kinds": len(kinds),
            "blobs": len(self.order),
            "parts": sum(len(t.parts) * t.family.expert_count for t in self.templates),
            "ranks": len(self.order),
        }
        places = [part.slices.places for part in kinds if isinstance(part.slices, Scattered)]
        if places:
            counts["slices"] = sum(map(len, places))
        if self.dense is not None:
            counts["tensors"] = len(self.dense.tensors)
            counts["shard_bytes"] = len(self.dense.other_ranges)
        if has_codecs:
            counts |= {"codecs": 1, "stored_digests": counts["parts"]}
        return sections.place(counts)

    def new_files(self) -> list[NewFile]:
        """Return all data files with the ranges to copy into them; the dense part is the last."""
        files = [
            NewFile(file.name, file.length, partial(self.extents, file)) for file in self.files
        ]
        if self.dense is not None:
            files.append(NewFile(DENSE_NAME, self.dense.length, self.dense.extents))
        return files

    def extents(self, file: PlannedFile) -> Iterator[Extent]:
        """Yield the parts of a file of blobs, in the order of their offsets."""
        start = 0
        for key in file.blobs:
            template = self.templates[key.template]
            for part, offset in zip(template.parts, template.offsets_in_blob, strict=True):
                shard, shard_offset = part.slices.at(key.expert)
                yield Extent(start + offset, part.length, shard, shard_offset)
            start += template.length


def make(
    experts: Experts,
    layout: Layout,
    *,
    dense: Dense | None = None,
    hotness: Hotness | None = None,
    layers: Sequence[int] | None = None,
) -> Plan:
    """Plan a pack of `experts` (all layers, or those in `layers`) in `layout`, and of `dense`.

    Without hotness the order is the source's. A layer that the hotness does not name at all was not
    measured, and comes last. Raises RequestError for a layer without experts and for a pack beyond
    the limits of the format.
    """
    families = _select(experts, layers)
    routed = {f.layer: f.expert_count for f in families if f.name == ROUTED_FAMILY}
    templates = _templates(families, routed, layout, hotness)
    in_source = [
        BlobKey(number, expert)
        for number, template in enumerate(templates)
        for expert in range(template.family.expert_count)
    ]
    counts = {}
    for blob in in_source:
        template = templates[blob.template]
        if hotness and template.hotness_measured:
            routed_count = routed.get(template.family.layer)
            counts[blob] = count_of(template.family, routed_count, hotness, blob.expert)
    # Sorting is stable: experts of equal hotness, and those not measured, keep the source's order.
    order = sorted(in_source, key=lambda blob: -counts.get(blob, -1))
    physical = order if layout.order == "hotness" else in_source
    group = _by_layer if layout.group == "layer" else _by_size
    plan = Plan(
        layout=layout,
        templates=templates,
        files=tuple(group(physical, templates, layout)),
        order=tuple(order),
        counts=counts,
        dense=_place_dense(dense, layout.tensor_alignment) if dense else None,
        hotness=hotness,
        layers=None if layers is None else tuple(layers),
    )
    _check_limits(plan)
    return plan


def _select(experts: Experts, layers: Sequence[int] | None) -> list[SourceFamily]:
    if layers is None:
        return list(experts.families)
    for layer in layers:
        if layer not in experts.layers:
            expected = "one of " + ", ".join(map(str, experts.layers[:64]))
            raise RequestError(f"layer {layer} has no experts", expected=expected)
    return [family for family in experts.families if family.layer in set(layers)]


def _templates(
    families: list[SourceFamily], routed: Mapping[int, int], layout: Layout, hotness: Hotness | None
) -> tuple[Template, ...]:
    templates: list[Template] = []
    blob = part = 0
    for family in families:
        parts = tuple(sorted(family.parts, key=lambda part: _part_order(part, layout)))
        offsets, length = place_parts(parts, [part.length for part in parts], layout)
        measured = is_measured(family, routed.get(family.layer), hotness)
        templates.append(Template(family, parts, offsets, length, blob, part, measured))
        blob += family.expert_count
        part += family.expert_count * len(parts)
    return tuple(templates)


def _part_order(part: SourcePart, layout: Layout) -> tuple[bool, int, int]:
    suffix = part.name.partition(".")[2]
    place = layout.projections.index(projection(part.name))
    return not part.is_weight, place, _SUFFIXES.index(suffix)


def place_parts(
    parts: Sequence[SourcePart], lengths: Sequence[int], layout: Layout
) -> tuple[tuple[int, ...], int]:
    """Place the parts of one blob: weights aligned, small parts together behind them.

    `lengths` are their stored bytes. Returns their offsets in the blob, and its length.
    """
    offsets = []
    position = 0
    small_before = False
    for part, length in zip(parts, lengths, strict=True):
        shares = small_before and not part.is_weight
        position = align(position, layout.small_alignment if shares else layout.part_alignment)
        offsets.append(position)
        position += length
        small_before = not part.is_weight
    return tuple(offsets), align(position, layout.blob_alignment)


def _by_layer(
    order: Sequence[BlobKey], templates: Sequence[Template], layout: Layout
) -> Iterator[PlannedFile]:
    layers: dict[int, list[BlobKey]] = {t.family.layer: [] for t in templates}
    for blob in order:
        layers[templates[blob.template].family.layer].append(blob)
    for layer, blobs in layers.items():
        yield _file(layout.file_named(layer), blobs, templates)


def _by_size(
    order: Sequence[BlobKey], templates: Sequence[Template], layout: Layout
) -> Iterator[PlannedFile]:
    assert layout.max_length is not None
    number = length = 0
    blobs: list[BlobKey] = []
    for blob in order:
        blob_length = templates[blob.template].length
        if blobs and length + blob_length > layout.max_length:
            yield _file(layout.file_named(number), blobs, templates)
            number, length, blobs = number + 1, 0, []
        blobs.append(blob)
        length += blob_length
    yield _file(layout.file_named(number), blobs, templates)


def _file(name: str, blobs: Sequence[BlobKey], templates: Sequence[Template]) -> PlannedFile:
    return PlannedFile(name, sum(templates[blob.template].length for blob in blobs), tuple(blobs))


def _place_dense(dense: Dense, alignment: int) -> PlannedDense:
    position = 0
    others, tensors = [], []
    for shard_range in dense.other_ranges:
        others.append((shard_range, position))
        position = align(position + shard_range.length, alignment)
    for tensor in dense.tensors:
        tensors.append((tensor, position))
        position = align(position + tensor.tensor.length, alignment)
    return PlannedDense(tuple(tensors), tuple(others), position)


def _check_limits(plan: Plan) -> None:
    directory = plan.directory(len(plan.new_files()), plan.layout.codec is not None)
    limits = (
        ("layers", plan.source_layers[-1] + 1, records.MAX_LAYERS),
        ("files", directory["files"].record_count, records.MAX_FILES),
        ("dense tensors", directory["tensors"].record_count, records.MAX_TENSORS),
        ("families", directory["families"].record_count, records.MAX_FAMILIES),
        ("part kinds", directory["part_kinds"].record_count, records.MAX_PART_KINDS),
        ("blobs", directory["blobs"].record_count, records.MAX_BLOBS),
        ("parts", directory["parts"].record_count, records.MAX_PARTS),
        ("bytes of index", directory.index_length, records.MAX_INDEX_LENGTH),
        ("bytes", plan.data_length, records.MAX_LENGTH),
    )
    for name, count, limit in limits:
        if count > limit:
            raise RequestError(f"the pack would have too many {name}", expected=limit, found=count)
