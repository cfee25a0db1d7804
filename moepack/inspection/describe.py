"""The facts of sources, packs, mirrors and blobs; `inspect` is the command as one call."""

from moepack.common import digest
from moepack.inspection.facts import (
    BlobFacts,
    FamilyFacts,
    MirrorFacts,
    PackFacts,
    PartFacts,
    PartialFacts,
    PlacedPartFacts,
    ShardFacts,
    SourceFacts,
)
from moepack.inspection.listing import blob_row
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.reading.pack import Pack
from moepack.source import ggml_types
from moepack.source.experts import Experts, find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.source.parameters import count_parameters
from moepack.source.shards import Source
from moepack.traces.hotness import coverage
from moepack.traces.hotness.coverage import routed_experts


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
    """Return the families, with all layers of like experts together."""
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


def _coverage(pack: Pack) -> coverage.Coverage | None:
    """Measure coverage by the index's counts; None without counts."""
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
    name = family or pack.families(layer)[0]
    owner = next(one for one in pack.index.families if (one.layer, one.name) == (layer, name))
    return BlobFacts(**blob_row(pack, owner, expert)._asdict(), parts=tuple(parts))
