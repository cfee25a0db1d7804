"""A manifest by which Anemll's llama.cpp reads the experts in a pack's own files.

Facts of Anemll/anemll-flash-llama.cpp (branch DeepSeek-V4-SSD, 7cdf28919: src/llama-model.cpp,
llama-context.cpp) and of a second reader, Aqirito/llama.cpp-omni (947639a46,
src/llama-moe-sidecar.cpp): the path of a JSON file is as good as that of a sidecar's folder;
`repacked_file` counts from its folder; expert E of a tensor lies at `repacked_offset` + E times
`expert_stride`, and a stride is at least as long as the offset and an expert together. So experts
have to be in the order of their numbers, from the start of a file on, at equal distances: the
layout `natural`. Between them may be padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moepack.common.escaping import shell_word
from moepack.common.paths import is_remote
from moepack.common.sizes import ranges_text
from moepack.pack.engines.contract import Engine, ExportPlan, LastFile, Need, Settings
from moepack.pack.engines.expert_tensors import (
    FAMILY,
    ExpertTensor,
    Layer,
    architecture_note,
    expert_tensors,
    needed_stacks,
    pack_command,
    tensors_of,
)
from moepack.pack.reading.pack import Pack

_ARCHITECTURES = (
    *("deepseek2", "deepseek4", "glm-dsa", "minimax-m2"),
    *("qwen3next", "qwen35moe", "gemma4", "mistral4"),
)


def _needs(pack: Pack, _settings: Settings) -> Iterator[Need]:
    if is_remote(pack.path):
        yield Need("it needs a pack on this machine", "copy the pack to this machine first")
    layers = expert_tensors(pack)
    yield from needed_stacks(layers)
    others = [number for number, layer in layers.items() if _stride(pack, layer) is None]
    if others:
        layers_text = f"layers {ranges_text(others)}"
        problem = f"it needs experts in their order, at equal distances: {layers_text} lack that"
        yield Need(problem, pack_command(pack, "--layout natural"))


def _stride(pack: Pack, layer: Layer) -> int | None:
    """Return the bytes from an expert to the next; None if they do not lie in order."""
    if any(file.is_shard for file in pack.index.files):
        return None
    stride = pack.index.blob(next(iter(layer.values())).family.first_blob)[1]
    for tensor in layer.values():
        first = tensor.extent(0, 0)
        if first.input_offset + first.length > stride:
            return None
        for expert in range(tensor.expert_count):
            place = first.input_offset + expert * stride
            extent = tensor.extent(expert, 0)
            if (extent.input, extent.input_offset) != (first.input, place):
                return None
    return stride


def _plan(pack: Pack, target: Path, _settings: Settings) -> ExportPlan:
    layers = expert_tensors(pack)
    data = json.dumps(_manifest(pack, target, layers), indent=1).encode() + b"\n"
    most = max(tensor.expert_count for tensor in tensors_of(layers))
    return ExportPlan(
        folder=target.parent,
        last=LastFile(target.name, lambda _progress: data),
        tensor_count=len(tensors_of(layers)),
        alignment=pack.index.header.blob_alignment,
        command=f"llama-cli -m MODEL.gguf --moe-sidecar {shell_word(str(target))}"
        f" --moe-mode slot-bank --moe-slot-bank {most}",
        notes=tuple(_notes(pack, layers)),
    )


def _notes(pack: Pack, layers: Mapping[int, Layer]) -> Iterator[str]:
    yield from architecture_note(pack, "the engine", _ARCHITECTURES)
    yield "with fewer slots than experts its output differs from that of llama.cpp"
    yield "in the mode resident-bank it reads other bytes, without an error"
    if len({tensor.expert_count for tensor in tensors_of(layers)}) > 1:
        yield "llama.cpp-omni refuses it: layers have different numbers of experts"


def _manifest(pack: Pack, target: Path, layers: Mapping[int, Layer]) -> dict[str, Any]:
    source = pack.manifest.source
    model = {
        "arch": source.architecture,
        "expert_count": tensors_of(layers)[0].expert_count,
        "leading_dense_block_count": min(layers),
    }
    used = source.experts_used_in(FAMILY, min(layers))
    if used is not None:
        model["expert_used_count"] = used
    folder = os.path.realpath(target.parent)
    return {
        "schema_version": 1,
        "sidecar_kind": "flashmoe_gguf",
        "layout": "layer_major_expert",
        "source": {"model_files": [shard.name for shard in source.shards]},
        "model": model,
        "entries": [
            _entry(pack, tensor, _stride(pack, layer), folder)
            for layer in layers.values()
            for tensor in layer.values()
        ],
    }


def _entry(pack: Pack, tensor: ExpertTensor, stride: int | None, folder: str) -> dict[str, Any]:
    kind = tensor.kind
    shard, source_offset = pack.index.origin(tensor.family, kind, 0)
    first = tensor.extent(0, 0)
    return {
        "layer": tensor.family.layer,
        "tensor_family": kind.name.removesuffix(".weight"),
        "tensor_name": tensor.name,
        "quant_type": kind.type_name,
        "shape": [*kind.shape, tensor.expert_count],
        "source_shard": pack.manifest.source.shards[shard].name,
        "source_shard_index": shard,
        "source_offset": source_offset,
        "exact_byte_length": tensor.length * tensor.expert_count,
        "bytes_per_expert": tensor.length,
        "expert_count": tensor.expert_count,
        "expert_major": True,
        "expert_stride": stride,
        "repacked_file": os.path.relpath(os.path.realpath(pack.file_paths[first.input]), folder),
        "repacked_offset": first.input_offset,
    }


ENGINE = Engine(
    name="anemll",
    title="Anemll's llama.cpp, and llama.cpp-omni",
    summary="Write a manifest by which Anemll's llama.cpp reads the pack where it is.",
    reads="a GGUF, and a manifest of the pack's own files",
    writes="one manifest, in the pack; the pack's layout has to be natural",
    copies="nothing",
    proof="by hand: the same logits as stock llama.cpp; what its loader checks: a test",
    is_folder=False,
    needs=_needs,
    plan=_plan,
    default_name="anemll.json",
)
