"""The packed experts of ds4: one file beside a GGUF, found by the offsets of its tensors.

Facts of antirez/ds4, pull request 848 (misc/pack_experts.py), little-endian: a header of 32 bytes
(`DSP1`, version 1, offset of the index, number of entries, zeros); entries of 48 bytes, by layer
and expert (where gate, up and down of the expert lie in the GGUF, bytes of gate or up, bytes of
down, offset in this file); from the next 4 KiB on gate, up and down of all experts without gaps.
ds4 finds `MODEL.gguf.dsp` beside MODEL.gguf. Its reader is not public: nothing of it was tried.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MoepackError
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
    ROLES,
    Layer,
    architecture_note,
    expert_tensors,
    needed_all_layers,
    needed_roles,
    tensors_of,
)
from moepack.pack.engines.one_gguf import given_gguf
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.report import Finding
from moepack.pack.verifying.witness import PartKey, Witness, read_shards
from moepack.storage.extents import Extent, NewFile

_SUFFIX = ".dsp"
_HEADER = struct.Struct("<4sIQQ8x")
_ENTRY = struct.Struct("<6Q")
_PAGE = 4096


def _needs(pack: Pack, settings: Settings) -> Iterator[Need]:
    layers = expert_tensors(pack)
    yield from needed_roles(layers)
    yield from needed_all_layers(pack)
    if any(layer["gate"].length != layer["up"].length for layer in _complete(layers)):
        yield Need("it needs gate and up of the same length")
    if settings["gguf"] is None and len(pack.manifest.source.shards) > 1:
        problem = "it needs the model in one GGUF, and this one was split"
        yield Need(problem, "make one with `moepack export gguf`, and name it with `gguf`")


def _complete(layers: Mapping[int, Layer]) -> list[Layer]:
    return [layer for layer in layers.values() if {*layer} >= {*ROLES}]


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    layers = expert_tensors(pack)
    gguf = settings["gguf"]
    offsets = _offsets_in_source(layers) if gguf is None else _offsets_in(pack, Path(gguf))
    objects = tuple(_objects(layers))
    head = b"".join(_head(objects, offsets))
    last = objects[-1]

    def extents() -> Iterator[Extent]:
        yield Extent(0, len(head), len(pack.file_paths), 0, digest.xxh3(head), "head")
        for one in objects:
            offset = one.offset
            for role in ROLES:
                yield one.layer[role].extent(one.expert, offset)
                offset += one.layer[role].length

    length = last.offset + _object_length(last.layer)
    notes = list(architecture_note(pack, "ds4", ("deepseek4",)))
    if not target.name.endswith(f".gguf{_SUFFIX}"):
        notes.append(f"ds4 finds it by its name beside the GGUF: MODEL.gguf{_SUFFIX}")
    model = target.with_suffix("") if target.suffix == _SUFFIX else Path("MODEL.gguf")
    return ExportPlan(
        folder=target.parent,
        files=(NewFile(target.name, length, extents),),
        heads=lambda _threads, _progress: (head,),
        tensor_count=len(list(tensors_of(layers))),
        alignment=1,
        command=f"ds4 -m {shell_word(str(model))}",
        notes=tuple(notes),
    )


class _Object(NamedTuple):
    """An expert, and the offset of its gate in the file."""

    layer: Layer
    expert: int
    offset: int


def _objects(layers: Mapping[int, Layer]) -> Iterator[_Object]:
    count = sum(layer["gate"].expert_count for layer in layers.values())
    offset = align(_HEADER.size + count * _ENTRY.size, _PAGE)
    for layer in layers.values():
        for expert in range(layer["gate"].expert_count):
            yield _Object(layer, expert, offset)
            offset += _object_length(layer)


def _object_length(layer: Layer) -> int:
    return sum(layer[role].length for role in ROLES)


def _head(objects: Sequence[_Object], offsets: Mapping[str, int]) -> Iterator[bytes]:
    yield _HEADER.pack(b"DSP1", 1, _HEADER.size, len(objects))
    for layer, expert, offset in objects:
        places = (offsets[layer[role].name] + expert * layer[role].length for role in ROLES)
        gate, up, down = places
        yield _ENTRY.pack(gate, up, down, layer["gate"].length, layer["down"].length, offset)


def _offsets_in_source(layers: Mapping[int, Layer]) -> dict[str, int]:
    """Return where the tensors lay in the one shard of the source."""
    return {tensor.name: tensor.kind.origin.offset for tensor in tensors_of(layers)}


def _offsets_in(pack: Pack, gguf: Path) -> dict[str, int]:
    return {tensor.name: tensor.offset for tensor in given_gguf(pack, gguf).tensors}


def _slices(path: Path, _expected: Sequence[ExpectedPart]) -> Iterator[Exported]:
    """Find the slices by the index and the GGUF beside the file, whose offsets it names."""
    try:
        witness = read_shards([str(path.with_suffix(""))])
    except MoepackError as error:
        yield Finding("file", f"its GGUF cannot be read: {error}", file=path.name)
        return
    with open(path, "rb") as file:
        header = file.read(32)
        if len(header) < 32 or header[:8] != b"DSP1\1\0\0\0":
            yield Finding("file", "not a packed file of ds4", file=path.name)
            return
        index_offset, count = struct.unpack_from("<QQ", header, 8)
        file.seek(index_offset)
        table = file.read(min(count, 1 << 24) * 48)
    if len(table) != count * 48:
        yield Finding("record", "the index is cut short", file=path.name)
        return
    yield ExportedFile(path, 32 + len(table))
    experts = _experts_at(witness)
    for number in range(count):
        yield from _entry(path, experts, struct.unpack_from("<6Q", table, 48 * number), number)


def _experts_at(witness: Witness) -> dict[int, tuple[PartKey, int]]:
    """Return the part and the expert at each offset of the GGUF."""
    return {
        start: (key, expert)
        for key, part in witness.parts.items()
        for expert, start in enumerate(part.starts)
    }


def _entry(
    path: Path, experts: Mapping[int, tuple[PartKey, int]], entry: Sequence[int], number: int
) -> Iterator[Exported]:
    *places, gate_length, down_length, offset = entry
    lengths = (gate_length, gate_length, down_length)
    for role, place, length in zip(("gate", "up", "down"), places, lengths, strict=True):
        key, expert = experts.get(place, (PartKey(-1, ""), -1))
        if key.part != f"ffn_{role}_exps.weight":
            message = f"entry {number} names a place of the GGUF where no {role} lies"
            yield Finding("record", message, file=path.name, offset=place)
        else:
            yield ExportedSlice(key.layer, expert, key.part, path, offset, length)
        offset += length


ENGINE = Engine(
    name="ds4",
    title="ds4",
    summary="Write packed experts for ds4, as a file beside the model's GGUF.",
    reads="a GGUF, and MODEL.gguf.dsp beside it",
    writes="one file of experts",
    copies="all experts",
    proof="golden bytes: a test; the engine's reader is not public",
    is_folder=False,
    needs=_needs,
    plan=_plan,
    slices=_slices,
    options=(
        ExportOption(
            "gguf", "file", "GGUF that ds4 reads; by default the source, if it was one file."
        ),
    ),
)
