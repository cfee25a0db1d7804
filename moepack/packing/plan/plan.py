"""The plan: the files of a pack, and the blobs in each. Pure: no file is opened."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.sizes import align
from moepack.pack.format import records
from moepack.pack.format.contents import (
    BlobKey,
    IndexContents,
    Template,
    in_source_order,
    list_templates,
)
from moepack.packing.plan.blob_hotness import family_counts
from moepack.packing.plan.layout import Layout
from moepack.source.dense import Dense
from moepack.source.experts import Experts
from moepack.storage.extents import Extent, NewFile
from moepack.traces.hotness.model import Hotness


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One data file: its blobs, one behind the other, and its length in bytes."""

    name: str
    length: int
    blobs: tuple[BlobKey, ...]


DENSE_NAME = "dense.bin"
"""The file that holds the dense part."""


@dataclass(frozen=True, slots=True)
class DenseFile:
    """The file of the dense part: the offset of each tensor and of each other range, its length."""

    dense: Dense
    tensor_offsets: tuple[int, ...]
    range_offsets: tuple[int, ...]
    length: int

    def extents(self) -> Iterator[Extent]:
        """Yield the ranges to copy, in the order of offsets: other ranges, then tensors."""
        others = zip(self.dense.other_ranges, self.range_offsets, strict=True)
        for (shard, shard_offset, length), offset in others:
            yield Extent(offset, length, shard, shard_offset)
        tensors = zip(self.dense.tensors, self.tensor_offsets, strict=True)
        for (shard, tensor), offset in tensors:
            yield Extent(offset, tensor.length, shard, tensor.offset)


@dataclass(frozen=True, slots=True)
class Plan(IndexContents):
    """A pack that is not written yet: its contents, and the files that they come to.

    `hotness` has the source of the counts; `layers` are None if all are packed, `dense_file` if
    experts alone are.
    """

    layout: Layout
    files: tuple[PlannedFile, ...]
    dense_file: DenseFile | None = None
    hotness: Hotness | None = None
    layers: tuple[int, ...] | None = None

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
        """The bytes of all data files."""
        return sum(file.length for file in self.new_files())

    @property
    def payload_length(self) -> int:
        """The bytes that come from the source."""
        others = self.dense.other_ranges if self.dense else ()
        other_length = sum(shard_range.length for shard_range in others)
        return self.expert_length + (self.dense_length or 0) + other_length

    @property
    def measured_blob_count(self) -> int | None:
        """The number of blobs that the hotness covers."""
        return None if self.hotness is None else len(self.counts)

    def hotness_to_json(self) -> dict[str, Any] | None:
        """Return the hotness for the manifest."""
        if self.hotness is None:
            return None
        counts = {"measured_blob_count": self.measured_blob_count, "blob_count": len(self.order)}
        return self.hotness.to_json() | counts

    @property
    def index_length(self) -> int:
        """The bytes of index.bin."""
        return self.directory(len(self.new_files())).index_length

    def new_files(self) -> list[NewFile]:
        """Return all data files with the ranges to copy into them; the dense part is the last."""
        files = [
            NewFile(file.name, file.length, partial(self.extents, file)) for file in self.files
        ]
        if self.dense_file is not None:
            files.append(NewFile(DENSE_NAME, self.dense_file.length, self.dense_file.extents))
        return files

    def extents(self, file: PlannedFile) -> Iterator[Extent]:
        """Yield the parts of a file of blobs, in the order of their offsets."""
        start = 0
        for key in file.blobs:
            template = self.templates[key.template]
            for part, offset in zip(template.parts, template.offsets_in_blob, strict=True):
                shard, shard_offset = part.at(key.expert)
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

    Without hotness the order is the source's. Layers that the hotness does not name come last.
    Raises RequestError for a layer without experts and for a pack beyond the limits of the format.
    """
    for layer in layers or ():
        if layer not in experts.layers:
            expected = "one of " + ", ".join(map(str, experts.layers[:64]))
            raise RequestError(f"layer {layer} has no experts", expected=expected)
    families = [f for f in experts.families if layers is None or f.layer in layers]
    measured = family_counts(families, hotness)
    templates = tuple(
        _place_parts(template, layout, counts is not None)
        for template, counts in zip(
            list_templates(families, layout.projections), measured, strict=True
        )
    )
    blobs = in_source_order(templates)
    counts = {
        blob: of_family[blob.expert]
        for blob in blobs
        if (of_family := measured[blob.template]) is not None
    }
    # Sorting is stable: experts of equal hotness, and those not measured, keep the source's order.
    order = sorted(blobs, key=lambda blob: -counts.get(blob, -1))
    physical = order if layout.order == "hotness" else blobs
    group = _by_layer if layout.group == "layer" else _by_size
    plan = Plan(
        alignments=(layout.blob_alignment, layout.part_alignment, layout.tensor_alignment),
        layout=layout,
        templates=templates,
        files=tuple(group(physical, templates, layout)),
        order=tuple(order),
        counts=counts,
        dense=dense,
        dense_file=_place_dense(dense, layout.tensor_alignment) if dense else None,
        hotness=hotness,
        layers=None if layers is None else tuple(layers),
    )
    plan.check_limits(len(plan.new_files()))
    if plan.data_length > records.MAX_LENGTH:
        problem = "the pack would have too many bytes"
        raise RequestError(problem, expected=records.MAX_LENGTH, found=plan.data_length)
    return plan


def _place_parts(template: Template, layout: Layout, is_measured: bool) -> Template:
    """Place the parts of one blob: weights aligned, small parts together behind them."""
    offsets = []
    position = 0
    small_before = False
    for part in template.parts:
        shares = small_before and not part.is_weight
        position = align(position, layout.small_alignment if shares else layout.part_alignment)
        offsets.append(position)
        position += part.length
        small_before = not part.is_weight
    length = align(position, layout.blob_alignment)
    return replace(
        template, offsets_in_blob=tuple(offsets), length=length, hotness_measured=is_measured
    )


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


def _place_dense(dense: Dense, alignment: int) -> DenseFile:
    position = 0
    offsets = []
    lengths = [one.length for one in dense.other_ranges]
    lengths += [tensor.length for _, tensor in dense.tensors]
    for length in lengths:
        offsets.append(position)
        position = align(position + length, alignment)
    count = len(dense.other_ranges)
    return DenseFile(dense, tuple(offsets[count:]), tuple(offsets[:count]), position)
