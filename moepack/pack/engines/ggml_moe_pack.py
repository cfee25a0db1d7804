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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.escaping import shell_word
from moepack.common.sizes import align
from moepack.pack.engines.contract import (
    Engine,
    ExpectedPart,
    Exported,
    ExportedFile,
    ExportedSlice,
    ExportOption,
    ExportPlan,
    Need,
    Settings,
)
from moepack.pack.engines.expert_tensors import (
    FAMILY,
    Layer,
    RoutedTensor,
    expert_tensors,
    needed_all_layers,
    needed_stacks,
    tensors_of,
)
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.report import Finding
from moepack.storage.extents import Extent, NewFile

_MAGIC = b"GGMLMOEPACKv1\0\0\0"
_HEADER = struct.Struct("<16sIIQQ")
_ENTRY = struct.Struct("<128siIQQ")
_PAGE = 4096
_ROLES = ("gate_up", "up", "gate", "down")
_SGLANGS = "kimi-k3"
"""The architecture that SGLang reads this format for."""


def _needs(pack: Pack, _settings: Settings) -> Iterator[Need]:
    layers = expert_tensors(pack)
    yield from needed_stacks(layers)
    yield from needed_all_layers(pack)


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    layers = expert_tensors(pack)
    order = settings["order"]
    if order == "auto":
        is_sglangs = pack.manifest.source.architecture == _SGLANGS
        order = "source" if is_sglangs else "hotness"
    parts = tuple(_placed(_in_order(pack, layers, order)))
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
        tensor_count=len(list(tensors_of(layers))),
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

    tensor: RoutedTensor
    expert: int
    offset: int


def _in_order(
    pack: Pack, layers: dict[int, Layer], order: str
) -> Iterator[tuple[RoutedTensor, int]]:
    """Yield parts, those of an expert together: by layer and expert, or the hottest first."""
    experts = _by_layer(layers) if order == "source" else _hottest_first(pack, layers)
    for layer, expert in experts:
        for role in _ROLES:
            if role in layer:
                yield layer[role], expert


def _by_layer(layers: dict[int, Layer]) -> Iterator[tuple[Layer, int]]:
    for layer in layers.values():
        for expert in range(next(iter(layer.values())).expert_count):
            yield layer, expert


def _hottest_first(pack: Pack, layers: dict[int, Layer]) -> Iterator[tuple[Layer, int]]:
    index = pack.index
    first_blobs = [family.first_blob for family in index.families]
    for rank in range(index.blob_count):
        blob = index.blob_at_rank(rank)
        family = index.families[bisect_right(first_blobs, blob) - 1]
        if family.name == FAMILY:
            yield layers[family.layer], blob - family.first_blob


def _placed(parts: Iterator[tuple[RoutedTensor, int]]) -> Iterator[_PlacedPart]:
    listed = list(parts)
    offset = _data_start(len(listed))
    for tensor, expert in listed:
        yield _PlacedPart(tensor, expert, offset)
        offset = align(offset + tensor.length, _PAGE)


def _data_start(entry_count: int) -> int:
    return align(_HEADER.size + entry_count * _ENTRY.size, _PAGE)


def _head(parts: Sequence[_PlacedPart], start: int) -> Iterator[bytes]:
    yield _HEADER.pack(_MAGIC, 1, _HEADER.size, len(parts), start)
    for part in parts:
        name = part.tensor.name.encode()
        yield _ENTRY.pack(name, part.expert, 0, part.offset, part.tensor.length)


def _slices(path: Path, _expected: Sequence[ExpectedPart]) -> Iterator[Exported]:
    """Find the slices by the index of the file."""
    with open(path, "rb") as file:
        header = file.read(40)
        if len(header) < 40 or header[:16] != b"GGMLMOEPACKv1".ljust(16, b"\0"):
            yield Finding("file", "not a GGMLMOEPACKv1", file=path.name)
            return
        version, header_length = struct.unpack_from("<II", header, 16)
        count, start = struct.unpack_from("<QQ", header, 24)
        table = file.read(min(count, 1 << 24) * 152)
    if (version, header_length) != (1, 40) or len(table) != count * 152 or start < 40 + len(table):
        yield Finding("record", "the header is wrong, or the index cut short", file=path.name)
        return
    yield ExportedFile(path, 40 + len(table))
    for number in range(count):
        entry = struct.unpack_from("<128siIQQ", table, 152 * number)
        name, expert, reserved, offset, length = entry
        fields = name.rstrip(b"\0").decode("ascii", "replace").split(".", 2)
        if reserved or offset % 4096 or offset < start or len(fields) != 3:
            message = f"entry {number} breaks a rule of the format"
            yield Finding("record", message, expert=expert, file=path.name)
            continue
        layer = int(fields[1]) if fields[1].isdecimal() else -1
        yield ExportedSlice(layer, expert, fields[2], path, offset, length)


ENGINE = Engine(
    name="ggmlmoepack",
    title="L-Ark's llama.cpp, and SGLang for Kimi K3",
    summary="Write experts as GGMLMOEPACKv1, each part on a page, the hottest first.",
    reads="GGMLMOEPACKv1, and a GGUF",
    writes="one file of experts, the hottest first; for Kimi K3 in the order of the source",
    copies="all experts",
    proof="the same bytes as SGLang's own writer, read by its validator: a test",
    is_folder=False,
    needs=_needs,
    plan=_plan,
    slices=_slices,
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
