"""GGMLMOEPACKv1: each part of each expert at a page of one file, for two engines.

Facts: header of 40 bytes (magic, version 1, 40, number of entries, start of the data), entries of
152 bytes (tensor name, expert, 0, offset, bytes), little-endian; up, gate and down of an expert in
this order, each on 4 KiB; the file ends with the last of them. L-Ark's llama.cpp
(ggml-cuda/moe_stream_batch.cu) sorts the entries by name and expert, so that any order works there:
the hottest experts come first. SGLang 0.5.23 (srt/model_loader/expert_pack/kimi_ggml.py) reads it
for Kimi K3 alone, layer by layer in the order of experts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.escaping import shell_word
from moepack.common.sizes import align
from moepack.pack.engines.contract import Engine, ExportOption, ExportPlan, Settings
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
from moepack.storage.regular_file import open_regular

_MAGIC = b"GGMLMOEPACKv1\0\0\0"
_HEADER = struct.Struct("<16sIIQQ")
_ENTRY = struct.Struct("<128siIQQ")
_PAGE = 4096
_MOST_ENTRIES = 1 << 24
_EVERYTHING = 1 << 62
"""More bytes than any model has."""
_ROLES = ("gate_up", "up", "gate", "down")
_SGLANGS = "kimi-k3"
"""The architecture that SGLang reads this format for."""
_Expert = tuple[int, int]
"""The layer and the number of an expert."""


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    layers = expert_tensors(pack)
    order = settings["order"]
    if order == "auto":
        is_sglangs = pack.manifest.source.architecture == _SGLANGS
        order = "source" if is_sglangs else "hotness"
    parts = tuple(_placed(layers, _in_order(pack, layers, order)))
    start = _data_start(len(parts))
    head = b"".join(_head(parts, start))
    end = parts[-1].offset + parts[-1].tensor.length

    def extents() -> Iterator[Extent]:
        yield Extent(0, len(head), len(pack.file_paths), 0, digest.xxh3(head), "head")
        for part in parts:
            yield part.tensor.extent(part.expert, part.offset)

    return ExportPlan(
        folder=target.parent,
        files=(NewFile(target.name, end, extents),),
        heads=lambda _threads, _progress: (head,),
        tensor_count=len(tensors_of(layers)),
        alignment=_PAGE,
        command=f"GGML_MOE_STREAM=1 GGML_MOE_EXPERT_PACK={shell_word(str(target))}"
        " llama-server -m MODEL.gguf",
        notes=_notes(order, pack.manifest.source.architecture),
    )


def _notes(order: str, architecture: str) -> tuple[str, ...]:
    if architecture != _SGLANGS:
        return ("L-Ark's llama.cpp reads it; SGLang reads it for Kimi K3 alone",)
    if order != "source":
        return ("SGLang needs the order of the source; L-Ark's llama.cpp takes any",)
    return ()


class _PlacedPart(NamedTuple):
    """A part of an expert at its offset in the file."""

    tensor: ExpertTensor
    expert: int
    offset: int


def _in_order(
    pack: Pack, layers: dict[int, Layer], order: str | Sequence[_Expert]
) -> Iterable[_Expert]:
    """Return all experts: by layer and number, the hottest first, or in an order that is given."""
    by_layer = [
        (number, expert)
        for number, layer in layers.items()
        for expert in range(expert_count(layer))
    ]
    if order == "source":
        return by_layer
    if isinstance(order, tuple) and sorted(order) == by_layer:
        return order
    return pack.hottest(_EVERYTHING, family=FAMILY)


def _placed(layers: dict[int, Layer], experts: Iterable[_Expert]) -> Iterator[_PlacedPart]:
    parts = [
        (layers[number][role], expert)
        for number, expert in experts
        for role in _ROLES
        if role in layers[number]
    ]
    offset = _data_start(len(parts))
    for tensor, expert in parts:
        yield _PlacedPart(tensor, expert, offset)
        offset = align(offset + tensor.length, _PAGE)


def _data_start(entry_count: int) -> int:
    return align(_HEADER.size + entry_count * _ENTRY.size, _PAGE)


def _head(parts: Sequence[_PlacedPart], start: int) -> Iterator[bytes]:
    yield _HEADER.pack(_MAGIC, 1, _HEADER.size, len(parts), start)
    for part in parts:
        name = part.tensor.name.encode()
        yield _ENTRY.pack(name, part.expert, 0, part.offset, part.tensor.length)


def _settings_of(_pack: Pack, path: Path) -> Settings:
    """Return the order of the experts in a file: any is right."""
    with open(path, "rb", opener=open_regular) as file:
        count = _HEADER.unpack(file.read(_HEADER.size))[3]
        table = file.read(min(count, _MOST_ENTRIES) * _ENTRY.size)
    entries = _ENTRY.iter_unpack(table)
    experts = ((int(name.split(b".")[1]), expert) for name, expert, *_ in entries)
    return {"order": tuple(dict.fromkeys(experts))}


ENGINE = Engine(
    name="ggmlmoepack",
    title="L-Ark's llama.cpp, and SGLang for Kimi K3",
    summary="Write experts as GGMLMOEPACKv1, each part on a page, the hottest first.",
    reads="GGMLMOEPACKv1, and a GGUF",
    writes="one file of experts, the hottest first; for Kimi K3 in the order of the source",
    copies="all experts",
    proof="the same bytes as SGLang's own writer, read by its validator: a test",
    is_folder=False,
    needs=needed_weights,
    plan=_plan,
    settings_of=_settings_of,
    options=(
        ExportOption(
            "order",
            "choice",
            "Order of experts; auto is source for Kimi K3, else hotness.",
            "auto",
            ("auto", "hotness", "source"),
        ),
    ),
)
