"""What a source or a pack consists of, looked up and put into facts.

`inspect` is the command of that name as one call. It opens what it is given and writes nothing.
"""

from moepack import digest
from moepack.errors import RequestError
from moepack.format.tables import PartKind
from moepack.hotness import coverage
from moepack.hotness.stored import routed_experts
from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.locations import BlobLocation, PartLocation
from moepack.reading.pack import Pack
from moepack.report import provenance
from moepack.report.facts import (
    BlobFacts,
    FamilyFacts,
    MirrorFacts,
    PackedFamilyFacts,
    PackFacts,
    PartFacts,
    PlacedPartFacts,
    ShardFacts,
    SourceFacts,
)
from moepack.source import ggml_types
from moepack.source.experts import Experts, SourcePart, find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.source.parameters import count_parameters
from moepack.source.shards import Source, open_source


def inspect(paths: PathOrPaths) -> SourceFacts | PackFacts:
    """Return the facts of a source, or of the pack in a directory.

    `paths` is a pack's directory, or what `open_source` takes. Raises SourceError or PackError for
    what is at fault, RequestError for no path at all.
    """
    if (path := named_pack(paths)) is not None:
        with Pack(path) as pack:
            return describe_pack(pack)
    source = open_source(paths)
    return describe_source(source, find_experts(source))


def describe_source(source: Source, experts: Experts) -> SourceFacts:
    """Return the facts of a source."""
    shape = shape_of_source(source, experts)
    name = source.value("general.name")
    return SourceFacts(
        architecture=source.architecture or None,
        name=name if isinstance(name, str) else None,
        shards=tuple(
            ShardFacts(shard.path, shard.file_length, len(shard.tensors), shard.alignment)
            for shard in source.shards
        ),
        layers=shape.layers,
        mtp_layers=shape.mtp_layers,
        experts_used=_stated_experts_used(source),
        families=_alike(experts),
        expert_length=sum(t.length for _, t in source.tensors() if t.name in experts.names),
        dense_length=shape.dense_length or 0,
        parameters=count_parameters(source, experts, shape),
    )


def _stated_experts_used(source: Source) -> int | tuple[int, ...] | None:
    """Return what the metadata says: one number, or one for each layer."""
    used = source.model_value("expert_used_count")
    if isinstance(used, tuple) and all(type(number) is int for number in used):
        return used
    return used if type(used) is int else None


def _alike(experts: Experts) -> tuple[FamilyFacts, ...]:
    """Put layers together whose experts are alike."""
    layers: dict[tuple[str, int, tuple[PartFacts, ...]], list[int]] = {}
    for family in experts.families:
        parts = tuple(map(_part_facts, family.parts))
        layers.setdefault((family.name, family.expert_count, parts), []).append(family.layer)
    return tuple(
        FamilyFacts(name, tuple(numbers), expert_count, sum(part.length for part in parts), parts)
        for (name, expert_count, parts), numbers in layers.items()
    )


def _part_facts(part: SourcePart) -> PartFacts:
    type_name = ggml_types.type_name(part.type_id)
    return PartFacts(part.name, type_name, part.type_id, part.shape, part.length, part.inferred)


def describe_pack(pack: Pack) -> PackFacts:
    """Return the facts of a pack."""
    index, stated = pack.index, pack.manifest
    shape = pack.shape
    others = sum(held.length for held in index.shard_bytes())
    payload_length = shape.expert_length + (shape.dense_length or 0) + others
    data_length = sum(file.length for file in index.files)
    stored_length = index.stored_length()
    padding_length = data_length - payload_length + shape.expert_length - stored_length
    has_padding = not any(file.is_shard for file in index.files)
    hotness = None if stated.hotness is None else provenance.hotness_facts(stated.hotness)
    return PackFacts(
        tool=stated.tool,
        is_whole=stated.is_whole,
        layout=provenance.layout_facts(stated.layout),
        source=provenance.source_facts(stated.source),
        hotness=hotness,
        coverage=_coverage(pack),
        layers=pack.layers,
        selected_layers=None if stated.layers is None else tuple(stated.layers),
        order=stated.blob_order,
        blob_alignment=index.header.blob_alignment,
        part_alignment=index.header.part_alignment,
        blob_count=index.blob_count,
        part_count=index.part_count,
        files=tuple(index.files),
        families=tuple(
            PackedFamilyFacts(
                family=family.name,
                layer=family.layer,
                expert_count=family.expert_count,
                hotness_measured=family.hotness_measured,
                parts=family.part_kinds,
            )
            for family in index.families
        ),
        codecs=index.codecs,
        index_length=index.header.index_length,
        data_length=data_length,
        expert_length=shape.expert_length,
        stored_length=stored_length,
        dense_length=shape.dense_length,
        payload_length=payload_length,
        padding_length=padding_length if has_padding else None,
        padding_share=padding_length / data_length if has_padding else None,
        mirror=describe_mirror(pack),
    )


def describe_mirror(pack: Pack) -> MirrorFacts | None:
    """Return the facts of a pack's mirror; None where it has none."""
    found = pack.mirror
    if found is None:
        return None
    description = found.description
    return MirrorFacts(
        path=found.path,
        length=None if description is None else description.length,
        data_length=sum(file.length for file in pack.index.files),
        hottest=None if description is None else description.hottest,
        problem=found.problem,
    )


def _coverage(pack: Pack) -> coverage.Coverage | None:
    """Measure coverage by the index's counts; None without counts."""
    experts = routed_experts(pack)
    counts = {key: found.hotness or 0 for key, found in experts.items()}
    lengths = {key: found.length for key, found in experts.items()}
    if not any(counts.values()):
        return None
    return coverage.of(counts, lengths)


def describe_blob(pack: Pack, layer: int, expert: int, *, family: str | None = None) -> BlobFacts:
    """Return where the blob of an expert and its parts lie, and what they are.

    Raises RequestError for an expert that the pack does not hold.
    """
    kinds = pack.parts(layer, family=family)
    parts = [pack.locate(layer, expert, kind.name, family=family) for kind in kinds]
    found = pack.hotness(layer, expert, family=family)
    blob = _blob(pack, layer, expert, family)
    return BlobFacts(
        layer=layer,
        expert=expert,
        family=family or pack.families(layer)[0],
        path=blob.path if blob else None,
        offset=blob.offset if blob else None,
        length=blob.length if blob else found.length,
        rank=found.rank,
        hotness=found.hotness,
        parts=tuple(map(_placed_part, parts, kinds)),
    )


def _blob(pack: Pack, layer: int, expert: int, family: str | None) -> BlobLocation | None:
    """Locate the blob of an expert that is there; None where it has none."""
    try:
        return pack.locate(layer, expert, family=family)
    except RequestError:
        return None


def _placed_part(part: PartLocation, kind: PartKind) -> PlacedPartFacts:
    return PlacedPartFacts(
        name=kind.name,
        type=kind.type_name,
        shape=kind.shape,
        path=part.path,
        offset=part.offset,
        offset_in_blob=None if part.blob_offset is None else part.offset_in_blob,
        stored_length=part.stored_length,
        length=part.length,
        digest=None if part.digest is None else digest.to_text(part.digest),
        codec=part.codec,
    )
