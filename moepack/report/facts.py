"""Facts about a source or a pack, as plain values: what `moepack inspect --json` prints."""

import math
from typing import Any

from moepack import digest
from moepack.format.index import PartKind
from moepack.hotness import coverage
from moepack.reading.catalog import BlobLocation, PartLocation
from moepack.reading.pack import Pack
from moepack.source import ggml_types
from moepack.source.experts import Experts, SourceFamily, mtp_start
from moepack.source.shards import Source


def describe_source(source: Source, experts: Experts) -> dict[str, Any]:
    """Describe a source; lengths in bytes, shapes of one expert in GGUF order."""
    of_experts = sum(t.length for _, t in source.tensors() if t.name in experts.names)
    of_all = sum(tensor.length for _, tensor in source.tensors())
    start = mtp_start(source)
    return {
        "kind": "source",
        "architecture": source.architecture,
        "name": source.value("general.name"),
        "shards": [
            {
                "path": shard.path,
                "length": shard.file_length,
                "tensor_count": len(shard.tensors),
                "alignment": shard.alignment,
            }
            for shard in source.shards
        ],
        "layers": list(experts.layers),
        "mtp_layers": [layer for layer in experts.layers if start is not None and layer >= start],
        "experts_used": source.model_value("expert_used_count"),
        "families": _grouped(experts),
        "expert_length": of_experts,
        "dense_length": of_all - of_experts,
        "parameters": _parameters(source, experts, start),
    }


def _grouped(experts: Experts) -> list[dict[str, Any]]:
    """Put layers together whose experts are alike."""
    alike: dict[tuple[Any, ...], list[SourceFamily]] = {}
    for family in experts.families:
        parts = tuple((p.name, p.type_id, p.shape, p.length, p.inferred) for p in family.parts)
        alike.setdefault((family.name, family.expert_count, parts), []).append(family)
    return [
        {
            "family": families[0].name,
            "layers": [family.layer for family in families],
            "expert_count": families[0].expert_count,
            "bytes_per_expert": sum(part.length for part in families[0].parts),
            "parts": [
                {
                    "name": part.name,
                    "type": ggml_types.type_name(part.type_id),
                    "type_id": part.type_id,
                    "shape": list(part.shape),
                    "length": part.length,
                    "inferred": part.inferred,
                }
                for part in families[0].parts
            ],
        }
        for families in alike.values()
    ]


def _parameters(source: Source, experts: Experts, mtp_layer: int | None) -> dict[str, int | None]:
    """Count elements: all, those of experts, and those that one token uses.

    Active are all dense tensors and the experts used per token, without multi-token-prediction
    layers, as llama.cpp decodes; None where the metadata does not say how many experts are used.
    """
    total = sum(math.prod(tensor.dims) for _, tensor in source.tensors())
    of_experts = sum(map(_elements, experts.families))
    active: int | None = total - of_experts
    for family in experts.families:
        used = _used(source, family)
        if used is None or active is None:
            active = None
        elif mtp_layer is None or family.layer < mtp_layer:
            active += _elements(family) * min(used, family.expert_count) // family.expert_count
    if active is not None and mtp_layer is not None:
        active -= sum(
            math.prod(tensor.dims)
            for _, tensor in source.tensors()
            if tensor.name not in experts.names and _layer(tensor.name) >= mtp_layer
        )
    return {"total": total, "active": active, "expert": of_experts}


def _layer(name: str) -> int:
    fields = name.split(".")
    return int(fields[1]) if len(fields) > 2 and fields[1].isdigit() else -1


def _elements(family: SourceFamily) -> int:
    return sum(math.prod(part.shape) for part in family.parts) * family.expert_count


def _used(source: Source, family: SourceFamily) -> int | None:
    is_value = family.name == "attn_v_exps"
    key = "attention.value_expert_used_count" if is_value else "expert_used_count"
    used = source.model_value(key)
    if isinstance(used, tuple):
        used = used[family.layer] if family.layer < len(used) else None
    return used if isinstance(used, int) else None


def describe_pack(pack: Pack) -> dict[str, Any]:
    """Describe a pack; lengths in bytes."""
    index = pack.index
    payload = sum(
        kind.length * family.expert_count for family in index.families for kind in family.part_kinds
    )
    data_length = sum(file.length for file in index.files)
    return {
        "kind": "pack",
        "tool": pack.manifest.tool,
        "layout": pack.manifest.layout,
        "source": pack.manifest.source,
        "hotness": pack.manifest.hotness,
        "coverage": _coverage(pack),
        "layers": list(pack.layers),
        "selected_layers": pack.manifest.layers,
        "order": _order(pack),
        "blob_alignment": index.header.blob_alignment,
        "part_alignment": index.header.part_alignment,
        "blob_count": index.blob_count,
        "part_count": index.header.part_count,
        "files": [{"name": file.name, "length": file.length} for file in index.files],
        "families": [
            {
                "family": family.name,
                "layer": family.layer,
                "expert_count": family.expert_count,
                "hotness_measured": family.hotness_measured,
                "parts": [kind._asdict() for kind in family.part_kinds],
            }
            for family in index.families
        ],
        "index_length": index.header.index_length,
        "data_length": data_length,
        "payload_length": payload,
        "padding_length": data_length - payload,
        "padding_share": (data_length - payload) / data_length,
    }


def _coverage(pack: Pack) -> dict[str, Any] | None:
    """Say how many bytes hold how much of what was measured; None where nothing was.

    As the packer stated it, on a half that was held out, else by the index's own counts.
    """
    stated = (pack.manifest.hotness or {}).get("coverage")
    if isinstance(stated, dict):
        return stated
    blobs = main_blobs(pack)
    counts = {(one.layer, one.expert): one.hotness or 0 for one in blobs}
    if not any(counts.values()):
        return None
    lengths = {(one.layer, one.expert): one.length for one in blobs}
    return coverage.of(counts, counts, lengths) | {"held_out": None, "token_count": None}


def main_blobs(pack: Pack) -> list[BlobLocation]:
    """List the blobs of all layers' main families."""
    return [
        pack.locate(layer, expert)
        for layer in pack.layers
        for expert in range(pack.expert_count(layer))
    ]


def _order(pack: Pack) -> str:
    """Say what the blobs are sorted by on disk."""
    blobs = pack.manifest.layout.get("blobs")
    by_hotness = isinstance(blobs, dict) and blobs.get("order") == "hotness"
    return "hotness" if by_hotness and pack.manifest.hotness else "source"


def describe_blob(pack: Pack, layer: int, expert: int, family: str | None) -> dict[str, Any]:
    """Describe one blob and its parts: where they lie, what they are."""
    where = pack.locate(layer, expert, family=family)
    facts = where._asdict() | {"path": str(where.path)}
    facts["parts"] = [
        _describe_part(pack.locate(layer, expert, kind.name), kind)
        for kind in pack.parts(layer, family=where.family)
    ]
    return facts


def _describe_part(where: PartLocation, kind: PartKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "type": kind.type_name,
        "shape": list(kind.shape),
        "offset": where.offset,
        "offset_in_blob": where.offset_in_blob,
        "stored_length": where.stored_length,
        "length": where.length,
        "digest": digest.to_text(where.digest),
    }
