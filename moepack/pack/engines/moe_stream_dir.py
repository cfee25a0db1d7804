"""A folder of expert tensors for `llama-server --moe-stream-dir`: one headerless file for each.

Facts: `layer_NN.gate.bin`, `.up.bin` and `.down.bin` (at least two digits); expert E is at E times
an expert's bytes, so that a file is the tensor as it is in the GGUF, which the engine needs as
well. There is nothing else in the folder: no manifest, no padding. Source: ssubbotin's llama.cpp,
branch feature/moe-expert-gpu-cache, by its logs and documents of 2026-05.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moepack.common.escaping import shell_word
from moepack.pack.engines.contract import Engine, ExportPlan, Need, Settings
from moepack.pack.engines.expert_tensors import (
    ROLES,
    expert_tensors,
    needed_all_layers,
    needed_roles,
    tensors_of,
)
from moepack.pack.reading.pack import Pack
from moepack.storage.extents import NewFile


def _needs(pack: Pack, _settings: Settings) -> Iterator[Need]:
    layers = expert_tensors(pack)
    yield from needed_roles(layers)
    yield from needed_all_layers(pack)


def _plan(pack: Pack, target: Path, _settings: Settings) -> ExportPlan:
    layers = expert_tensors(pack)
    files = tuple(
        NewFile(
            f"layer_{number:02}.{role}.bin",
            layer[role].length * layer[role].expert_count,
            layer[role].extents,
        )
        for number, layer in layers.items()
        for role in ROLES
    )
    return ExportPlan(
        folder=target,
        files=files,
        tensor_count=len(tensors_of(layers)),
        alignment=1,
        command=f"llama-server -m MODEL.gguf --moe-stream-dir {shell_word(str(target))}",
        notes=("the engine does not check that the folder belongs to its model",),
    )


ENGINE = Engine(
    name="moe-stream-dir",
    title="ssubbotin's llama-server",
    summary="Write each expert tensor to a file, for a llama-server that streams experts.",
    reads="a GGUF, and a folder of files, one for each expert tensor",
    writes="layer_NN.gate.bin, .up.bin and .down.bin",
    copies="all experts",
    proof="each file is the GGUF's tensor: a test",
    is_folder=True,
    needs=_needs,
    plan=_plan,
    owns_folder=True,
)
