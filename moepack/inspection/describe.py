"""The facts of sources, packs, mirrors and blobs, as the commands print them as text or JSON.

JSON has the same fields in the same order. Lengths and offsets are bytes, an offset counts from the
start of the file unless its name says otherwise, and shapes are one expert's in GGUF order. None is
unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.inspection.listing import blob_row
from moepack.pack.format.source_entry import SourceEntry
from moepack.pack.format.tables import DataFile, PackedFamily
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.reading.pack import Pack
from moepack.source import ggml_types
from moepack.source.experts import Experts, find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.source.parameters import Parameters, count_parameters
from moepack.source.shards import Source
from moepack.traces.hotness import coverage
from moepack.traces.hotness.coverage import Coverage, routed_experts

_MAX_COUNT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One file of a source."""

    path: str
    length: int
    tensor_count: int
    alignment: int


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A part of each expert of a family; `inferred` if only a gap proves its length."""

    name: str
    type: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    inferred: bool


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """The experts of all layers in which they are alike."""

    family: str
    layers: tuple[int, ...]
    expert_count: int
    bytes_per_expert: int
    parts: tuple[PartFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """A source: its shards, experts and sizes."""

    kind: str = "source"
    architecture: str | None
    name: str | None
    shards: tuple[ShardFacts, ...]
    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    experts_used: int | tuple[int, ...] | None
    families: tuple[FamilyFacts, ...]
    expert_length: int
    dense_length: int
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorFacts:
    """The mirror of a pack: its folder, and the bytes in it of the pack's data files.

    `hottest` is the requested length, None for all experts. `problem` says why it is not read, None
    if it is; `length` is None if its content is unknown.
    """

    path: Path
    length: int | None
    data_length: int
    hottest: int | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFacts:
    """The share of a partial pack that is on this machine: experts, and bytes with the dense part.

    `layers` are those with all of their experts here, `missing_layers` those with none of them.
    Whatever is not here is read from `origin`.
    """

    origin: str
    expert_count: int
    all_expert_count: int
    layers: tuple[int, ...]
    missing_layers: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFacts:
    """A pack: its files, experts and sizes, and its source.

    `layout` and `hotness` are provenance as the manifest has it: whatever stands there is no error.
    `dense_length` is None if it holds experts alone. An index over shards has no data of its own:
    there `padding_length` and `padding_share` are None.
    """

    kind: str = "pack"
    tool: str
    is_whole: bool
    layout: Mapping[str, Any]
    source: SourceEntry
    hotness: Mapping[str, Any] | None
    coverage: Coverage | None
    layers: tuple[int, ...]
    selected_layers: tuple[int, ...] | None
    order: str
    blob_alignment: int
    part_alignment: int
    blob_count: int
    part_count: int
    files: tuple[DataFile, ...]
    families: tuple[PackedFamily, ...]
    index_length: int
    data_length: int
    expert_length: int
    dense_length: int | None
    payload_length: int
    padding_length: int | None
    padding_share: float | None
    mirror: MirrorFacts | None
    partial: PartialFacts | None

    @property
    def layout_name(self) -> str | None:
        """The name of the layout; None if the manifest has no text there."""
        name = self.layout.get("name")
        return name if isinstance(name, str) else None

    def hotness_count(self, name: str) -> int | None:
        """Return a count of `hotness`, such as `token_count`; None if the manifest has none."""
        count = None if self.hotness is None else self.hotness.get(name)
        return count if type(count) is int and 0 <= count <= _MAX_COUNT else None


@dataclass(frozen=True, slots=True)
class PlacedPartFacts:
    """One part of one expert, and its place."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    offset_in_blob: int | None
    length: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """The places of an expert's blob and of its parts; without a blob, of the parts alone."""

    layer: int
    expert: int
    family: str
    path: Path | None
    offset: int | None
    length: int
    rank: int
    hotness: int | None
    parts: tuple[PlacedPartFacts, ...]


@dataclass(frozen=True, slots=True)
class ExtractFacts:
    """A blob or part that was written to a file; `part` is None for a whole blob."""

    layer: int
    expert: int
    part: str | None
    path: str
    length: int


def inspect(model: Model) -> SourceFacts | PackFacts:
    """Return the facts of a source, or of the pack in a directory.

    `model` is a pack's directory, what `open_source` takes, or an open pack. Raises SourceError or
    PackError, by what is at fault, and RequestError without a path.
    """
    with pack_or_source(model) as opened:
        if isinstance(opened, Pack):
            return describe_pack(opened)
        return describe_source(opened, find_experts(opened))


def describe_source(source: Source, experts: Experts) -> SourceFacts:
    """Return the facts of a source."""
    shape = shape_of_source(source, experts)
    name = source.value("general.name")
    used = source.model_value("expert_used_count")
    numbers = used if isinstance(used, tuple) else (used,)
    return SourceFacts(
        architecture=source.architecture or None,
        name=name if isinstance(name, str) else None,
        shards=tuple(
            ShardFacts(shard.path, shard.file_length, len(shard.tensors), shard.alignment)
            for shard in source.shards
        ),
        layers=shape.layers,
        mtp_layers=shape.mtp_layers,
        experts_used=used if all(type(number) is int for number in numbers) else None,
        families=_families(experts),
        expert_length=sum(t.length for _, t in source.tensors() if t.name in experts.names),
        dense_length=shape.dense_length or 0,
        parameters=count_parameters(source, experts, shape),
    )


def _families(experts: Experts) -> tuple[FamilyFacts, ...]:
    layers: dict[tuple[str, int, tuple[PartFacts, ...]], list[int]] = {}
    for family in experts.families:
        parts = tuple(
            PartFacts(
                name=part.name,
                type=ggml_types.type_name(part.type_id),
                type_id=part.type_id,
                shape=part.shape,
                length=part.length,
                inferred=part.inferred,
            )
            for part in family.parts
        )
        layers.setdefault((family.name, family.expert_count, parts), []).append(family.layer)
    return tuple(
        FamilyFacts(name, tuple(numbers), expert_count, sum(part.length for part in parts), parts)
        for (name, expert_count, parts), numbers in layers.items()
    )


def describe_pack(pack: Pack) -> PackFacts:
    """Return the facts of a pack."""
    index, manifest, shape = pack.index, pack.manifest, pack.shape
    others = sum(record.length for record in index.shard_bytes())
    payload_length = shape.expert_length + (shape.dense_length or 0) + others
    data_length = sum(file.length for file in index.files)
    padding_length = data_length - payload_length
    has_padding = not any(file.is_shard for file in index.files)
    return PackFacts(
        tool=manifest.tool,
        is_whole=manifest.is_whole,
        layout=manifest.layout,
        source=manifest.source,
        hotness=manifest.hotness,
        coverage=_coverage(pack),
        layers=pack.layers,
        selected_layers=None if manifest.layers is None else tuple(manifest.layers),
        order=manifest.blob_order,
        blob_alignment=index.header.blob_alignment,
        part_alignment=index.header.part_alignment,
        blob_count=index.blob_count,
        part_count=index.part_count,
        files=tuple(index.files),
        families=tuple(index.families),
        index_length=index.header.index_length,
        data_length=data_length,
        expert_length=shape.expert_length,
        dense_length=shape.dense_length,
        payload_length=payload_length,
        padding_length=padding_length if has_padding else None,
        padding_share=padding_length / data_length if has_padding else None,
        mirror=describe_mirror(pack),
        partial=describe_partial(pack),
    )


def describe_mirror(pack: Pack) -> MirrorFacts | None:
    """Return the facts of a pack's mirror; None if it has none."""
    mirror = pack.mirror
    if mirror is None:
        return None
    record = mirror.record
    return MirrorFacts(
        path=mirror.path,
        length=None if record is None else record.length,
        data_length=sum(file.length for file in pack.index.files),
        hottest=None if record is None or record.request.is_all else record.request.hottest,
        problem=mirror.problem,
    )


def describe_partial(pack: Pack) -> PartialFacts | None:
    """Return the facts of a partial pack; None for any other."""
    if pack.partial is None:
        return None
    counts = dict.fromkeys(pack.layers, 0)
    all_counts = dict.fromkeys(pack.layers, 0)
    for family in pack.index.families:
        here = (
            pack.is_local(family.layer, n, family=family.name) for n in range(family.expert_count)
        )
        counts[family.layer] += sum(here)
        all_counts[family.layer] += family.expert_count
    return PartialFacts(
        origin=str(pack.partial.origin),
        expert_count=sum(counts.values()),
        all_expert_count=sum(all_counts.values()),
        layers=tuple(layer for layer in counts if counts[layer] == all_counts[layer]),
        missing_layers=tuple(layer for layer in counts if not counts[layer]),
        length=pack.partial.record.length,
    )


def _coverage(pack: Pack) -> Coverage | None:
    experts = routed_experts(pack)
    counts = {key: hotness.hotness or 0 for key, hotness in experts.items()}
    if not any(counts.values()):
        return None
    return coverage.measure(counts, {key: hotness.length for key, hotness in experts.items()})


def describe_blob(pack: Pack, layer: int, expert: int, *, family: str | None = None) -> BlobFacts:
    """Return the places of an expert's blob and of its parts.

    Raises RequestError for an expert that the pack does not hold.
    """
    parts = []
    for kind in pack.parts(layer, family=family):
        part = pack.locate(layer, expert, kind.name, family=family)
        parts.append(
            PlacedPartFacts(
                name=kind.name,
                type=kind.type_name,
                shape=kind.shape,
                path=part.path,
                offset=part.offset,
                offset_in_blob=None if part.blob_offset is None else part.offset_in_blob,
                length=part.length,
                digest=None if part.digest is None else digest.to_text(part.digest),
            )
        )
    row = blob_row(pack, pack.packed_family(layer, family), expert)
    return BlobFacts(**row._asdict(), parts=tuple(parts))
