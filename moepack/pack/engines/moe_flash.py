"""The experts directory of llama-cpp-moe-flash: one file for each expert, and a manifest.

Facts of cecil-the-coder/llama-cpp-moe-flash (dd8f5c4, tools/split_experts.py and its reader): files
`L000_E0000.bin` with gate, up and down (or gate_up and down) without gaps, then zeros up to a
multiple of 2 MiB; manifest.json with the keys in this order and a space after each colon, since the
reader scans the text for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moepack.common.escaping import shell_word
from moepack.common.sizes import align
from moepack.pack.engines.contract import (
    MAX_MANIFEST_LENGTH,
    Engine,
    ExportOption,
    ExportPlan,
    LastFile,
    Settings,
    checked_alignment,
)
from moepack.pack.engines.expert_tensors import (
    FAMILY,
    ExpertTensor,
    Layer,
    expert_count,
    expert_tensors,
    needed_weights,
    tensors_of,
)
from moepack.pack.reading.pack import Pack
from moepack.storage.extents import Extent, NewFile
from moepack.storage.regular_file import read_back

_MANIFEST_NAME = "manifest.json"
_ALIGNMENT = 2 << 20
_MAX_ALIGNMENT = 1 << 30
_ROLES = ("gate_up", "gate", "up", "down")
_MOST_EXPERTS, _MOST_USED = 256, 16


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    alignment = checked_alignment(settings["alignment"], 1, _MAX_ALIGNMENT)
    layers = expert_tensors(pack)
    files = tuple(
        NewFile(
            f"L{number:03}_E{expert:04}.bin",
            align(sum(part.length for part in layer.values()), alignment),
            partial(_extents, layer, expert),
        )
        for number, layer in layers.items()
        for expert in range(expert_count(layer))
    )
    manifest = json.dumps(_manifest(pack, layers, alignment), indent=2).encode()
    return ExportPlan(
        folder=target,
        files=files,
        last=LastFile(_MANIFEST_NAME, lambda _progress: manifest),
        tensor_count=len(tensors_of(layers)),
        alignment=alignment,
        command="LLAMA_FLASH_MOE_ENABLED=1 LLAMA_FLASH_MOE_MODE=async_prefetch"
        f" LLAMA_FLASH_MOE_EXPERTS_DIR={shell_word(str(target))} llama-server -m MODEL.gguf",
        notes=tuple(_notes(pack, layers)),
    )


def _settings_of(_pack: Pack, path: Path) -> Settings:
    manifest = json.loads(read_back(path / _MANIFEST_NAME, MAX_MANIFEST_LENGTH))
    return {"alignment": checked_alignment(int(manifest["alignment"]), 1, _MAX_ALIGNMENT)}


def _notes(pack: Pack, layers: Mapping[int, Layer]) -> Iterator[str]:
    most = max(map(expert_count, layers.values()))
    if most > _MOST_EXPERTS:
        yield f"the engine does not prefetch experts from {_MOST_EXPERTS} on: there are {most:,}"
    used = pack.manifest.source.experts_used_in(FAMILY, min(layers))
    if used is not None and used > _MOST_USED:
        yield f"the engine prefetches {_MOST_USED} experts of a token: the model uses {used}"


def _parts(layer: Layer) -> Iterator[tuple[str, ExpertTensor, int]]:
    """Yield the parts of an expert: projection, tensor, and offset in its file."""
    offset = 0
    for role in _ROLES:
        if role in layer:
            yield role, layer[role], offset
            offset += layer[role].length


def _extents(layer: Layer, expert: int) -> Iterator[Extent]:
    for _, tensor, offset in _parts(layer):
        yield tensor.extent(expert, offset)


def _manifest(pack: Pack, layers: Mapping[int, Layer], alignment: int) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {
            "layer": number,
            "n_experts": expert_count(layer),
            "experts": [
                _expert(number, layer, expert, alignment) for expert in range(expert_count(layer))
            ],
        }
        for number, layer in layers.items()
    ]
    return {
        "version": 1,
        "source_gguf": pack.manifest.source.shards[0].name,
        "alignment": alignment,
        "n_layers": len(layers),
        "n_experts": entries[0]["n_experts"],
        "layers": entries,
        "total_bytes": sum(
            expert["padded_size"] for layer in entries for expert in layer["experts"]
        ),
    }


def _expert(number: int, layer: Layer, expert: int, alignment: int) -> dict[str, Any]:
    length = sum(part.length for part in layer.values())
    return {
        "id": expert,
        "file": f"L{number:03}_E{expert:04}.bin",
        "parts": [
            {
                "name": role,
                "offset": offset,
                "size": tensor.length,
                "type": tensor.kind.type_name,
                "dims": list(tensor.kind.shape),
            }
            for role, tensor, offset in _parts(layer)
        ],
        "padded_size": align(length, alignment),
        "raw_size": length,
    }


ENGINE = Engine(
    name="moe-flash",
    title="llama-cpp-moe-flash",
    summary="Write a file for each expert and a manifest, for llama-cpp-moe-flash.",
    reads="a GGUF, and a folder with a file for each expert",
    writes="L000_E0000.bin and so on, and manifest.json",
    copies="all experts",
    proof="golden bytes: a test; by hand, the same files as its own tool's",
    is_folder=True,
    needs=needed_weights,
    plan=_plan,
    owns_folder=True,
    settings_of=_settings_of,
    options=(
        ExportOption("alignment", "size", "Multiple that each file is filled up to.", _ALIGNMENT),
    ),
)
