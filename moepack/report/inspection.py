"""What a source or a pack consists of, looked up and put into facts.

`inspect` is the command of that name as one call. It opens what it is given and writes nothing.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from moepack import digest
from moepack.format import manifest
from moepack.format.index import PartKind
from moepack.hotness import coverage
from moepack.hotness.stored import routed_blobs
from moepack.reading.pack import JOURNAL_NAME, Pack, PartLocation
from moepack.report import provenance
from moepack.report.facts import (
    BlobFacts,
    CoverageFacts,
    CoveredLength,
    FamilyFacts,
    PackedFamilyFacts,
    PackFacts,
    ParameterFacts,
    PartFacts,
    PlacedPartFacts,
    ShardFacts,
    SourceFacts,
)
from moepack.source import experts, ggml_types
from moepack.source.experts import Experts, Family, Part
from moepack.source.shards import Source, open_source

AnyPath = str | os.PathLike[str]


def inspect(paths: AnyPath | Sequence[AnyPath]) -> SourceFacts | PackFacts:
    """Return the facts of a source, or of the pack in a directory.

    `paths` is a pack's directory, or what `open_source` takes. Raises SourceError or PackError for
    what is at fault, RequestError for no path at all.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if len(listed) == 1 and _is_pack(Path(listed[0])):
        with Pack(listed[0]) as pack:
            return describe_pack(pack)
    source = open_source(listed)
    return describe_source(source, experts.find(source))


def _is_pack(path: Path) -> bool:
    """Whether a directory has any of what only a pack has, if only an interrupted one."""
    names = (manifest.NAME, manifest.INDEX_NAME, JOURNAL_NAME)
    return any((path / name).exists() for name in names)


def describe_source(source: Source, found: Experts) -> SourceFacts:
    """Return the facts of a source."""
    expert_length = sum(t.length for _, t in source.tensors() if t.name in found.names)
    total_length = sum(tensor.length for _, tensor in source.tensors())
    mtp_start = experts.mtp_start(source)
    name = source.value("general.name")
    return SourceFacts(
        architecture=source.architecture or None,
        name=name if isinstance(name, str) else None,
        shards=tuple(
            ShardFacts(shard.path, shard.file_length, len(shard.tensors), shard.alignment)
            for shard in source.shards
        ),
        layers=found.layers,
        mtp_layers=tuple(
            layer for layer in found.layers if mtp_start is not None and layer >= mtp_start
        ),
        experts_used=_stated_experts_used(source),
        families=_alike(found),
        expert_length=expert_length,
        dense_length=total_length - expert_length,
        parameters=_parameters(source, found, mtp_start),
    )


def _stated_experts_used(source: Source) -> int | tuple[int, ...] | None:
    """Return what the metadata says: one number, or one for each layer."""
    used = source.model_value("expert_used_count")
    if isinstance(used, tuple) and all(type(number) is int for number in used):
        return used
    return used if type(used) is int else None


def _alike(found: Experts) -> tuple[FamilyFacts, ...]:
    """Put layers together whose experts are alike."""
    layers: dict[tuple[str, int, tuple[PartFacts, ...]], list[int]] = {}
    for family in found.families:
        parts = tuple(map(_part_facts, family.parts))
        layers.setdefault((family.name, family.expert_count, parts), []).append(family.layer)
    return tuple(
        FamilyFacts(name, tuple(numbers), expert_count, sum(part.length for part in parts), parts)
        for (name, expert_count, parts), numbers in layers.items()
    )


def _part_facts(part: Part) -> PartFacts:
    type_name = ggml_types.type_name(part.type_id)
    return PartFacts(part.name, type_name, part.type_id, part.shape, part.length, part.inferred)


def _parameters(source: Source, found: Experts, mtp_start: int | None) -> ParameterFacts:
    """Count elements: all, those of experts, and those that one token uses.

    Active are all dense tensors and the experts used per token, without multi-token-prediction
    layers, as llama.cpp decodes; None where the metadata does not say how many experts are used.
    """
    total = sum(math.prod(tensor.dims) for _, tensor in source.tensors())
    expert = sum(map(_elements, found.families))
    active: int | None = total - expert
    for family in found.families:
        used = _used(source, family)
        if used is None or active is None:
            active = None
        elif mtp_start is None or family.layer < mtp_start:
            active += _elements(family) * min(used, family.expert_count) // family.expert_count
    if active is not None and mtp_start is not None:
        active -= sum(
            math.prod(tensor.dims)
            for _, tensor in source.tensors()
            if tensor.name not in found.names and _layer(tensor.name) >= mtp_start
        )
    return ParameterFacts(total, active, expert)


def _layer(name: str) -> int:
    fields = name.split(".")
    return int(fields[1]) if len(fields) > 2 and fields[1].isdigit() else -1


def _elements(family: Family) -> int:
    return sum(math.prod(part.shape) for part in family.parts) * family.expert_count


def _used(source: Source, family: Family) -> int | None:
    is_value = family.name == "attn_v_exps"
    key = "attention.value_expert_used_count" if is_value else "expert_used_count"
    used = source.model_value(key)
    if isinstance(used, tuple):
        used = used[family.layer] if family.layer < len(used) else None
    return used if isinstance(used, int) else None


def describe_pack(pack: Pack) -> PackFacts:
    """Return the facts of a pack."""
    index, stated = pack.index, pack.manifest
    payload_length = sum(
        kind.length * family.expert_count for family in index.families for kind in family.part_kinds
    )
    data_length = sum(file.length for file in index.files)
    hotness = None if stated.hotness is None else provenance.hotness_facts(stated.hotness)
    return PackFacts(
        tool=stated.tool,
        layout=provenance.layout_facts(stated.layout),
        source=provenance.source_facts(stated.source),
        hotness=hotness,
        coverage=(hotness and hotness.coverage) or _own_coverage(pack),
        layers=pack.layers,
        selected_layers=None if stated.layers is None else tuple(stated.layers),
        order=_order(pack),
        blob_alignment=index.header.blob_alignment,
        part_alignment=index.header.part_alignment,
        blob_count=index.blob_count,
        part_count=index.header.part_count,
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
        index_length=index.header.index_length,
        data_length=data_length,
        payload_length=payload_length,
        padding_length=data_length - payload_length,
        padding_share=(data_length - payload_length) / max(data_length, 1),
    )


def _own_coverage(pack: Pack) -> CoverageFacts | None:
    """Measure by the index's own counts what the packer did not state; None without counts."""
    blobs = routed_blobs(pack)
    counts: dict[tuple[int, int], int] = {key: blob.hotness or 0 for key, blob in blobs.items()}
    lengths: dict[tuple[int, int], int] = {key: blob.length for key, blob in blobs.items()}
    if not any(counts.values()):
        return None
    facts = coverage.of(counts, counts, lengths)
    covered = (CoveredLength(item["percent"], item["length"]) for item in facts["lengths"])
    return CoverageFacts(tuple(covered), facts["total_length"], held_out=None, token_count=None)


def _order(pack: Pack) -> str:
    """Say what the blobs are sorted by on disk."""
    rules = pack.manifest.layout.get("blobs")
    by_hotness = isinstance(rules, dict) and rules.get("order") == "hotness"
    return "hotness" if by_hotness and pack.manifest.hotness else "source"


def describe_blob(pack: Pack, layer: int, expert: int, *, family: str | None = None) -> BlobFacts:
    """Return where the blob of an expert and its parts lie, and what they are.

    Raises RequestError for an expert that the pack does not hold.
    """
    blob = pack.locate(layer, expert, family=family)
    parts = (
        _placed_part(pack.locate(layer, expert, kind.name, family=blob.family), kind)
        for kind in pack.parts(layer, family=blob.family)
    )
    return BlobFacts(*blob, parts=tuple(parts))


def _placed_part(part: PartLocation, kind: PartKind) -> PlacedPartFacts:
    return PlacedPartFacts(
        name=kind.name,
        type=kind.type_name,
        shape=kind.shape,
        offset=part.offset,
        offset_in_blob=part.offset_in_blob,
        stored_length=part.stored_length,
        length=part.length,
        digest=digest.to_text(part.digest),
    )
