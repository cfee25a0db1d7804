"""One stock GGUF of a whole pack, which llama.cpp loads: dense tensors first, experts by layer.

llama.cpp maps a file from its first to its last tensor of a kind, so dense tensors first keep these
windows small, and experts on pages can be read past the page cache without a copy. Tensors follow
each other without gaps, as llama.cpp demands (ggml/src/gguf.cpp, b11549); so the slices of an
expert stay apart. The format: ggml/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word, shell_words
from moepack.common.sizes import align
from moepack.pack.engines.contract import (
    Engine,
    ExportOption,
    ExportPlan,
    Settings,
    checked_alignment,
)
from moepack.pack.engines.expert_tensors import ExpertTensor
from moepack.pack.opening.open_model import read_first_header
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import check_whole, tensor_extent
from moepack.source import gguf_header
from moepack.source.folder import SHARD_NAME
from moepack.storage.extents import Extent, NewFile

ALIGNMENT = 4096
_LEAST_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 21

_VERSION = 3
_U32_TYPE = 4
_ALIGNMENT_KEY = "general.alignment"


class LaidTensor(NamedTuple):
    """A tensor of the GGUF: `extents` are the places of its bytes in the pack and in the GGUF."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    extents: tuple[Extent, ...]

    @property
    def offset(self) -> int:
        """The offset of the tensor, from the start of the GGUF."""
        return self.extents[0].offset

    def own_extents(self) -> Iterator[Extent]:
        """Yield the places of its bytes, for a file that is this tensor."""
        return (one._replace(offset=one.offset - self.offset) for one in self.extents)


class GgufLayout(NamedTuple):
    """The GGUF: its header with the padding behind it, and its tensors, dense ones first.

    Experts lie from `experts_offset` to the end, which is `length`.
    """

    header: bytes
    dense: tuple[LaidTensor, ...]
    experts: tuple[LaidTensor, ...]
    experts_offset: int
    length: int

    def file(self, name: str, head: int) -> NewFile:
        """Return the GGUF as a file to write; its header is input `head`."""
        return NewFile(name, self.length, partial(self._extents, head))

    def _extents(self, head: int) -> Iterator[Extent]:
        yield Extent(0, len(self.header), head, 0, digest.xxh3(self.header), "header")
        for tensor in (*self.dense, *self.experts):
            yield from tensor.extents


def lay_out(pack: Pack, alignment: int) -> GgufLayout:
    """Lay a pack out, with `alignment` in bytes, a power of two.

    Metadata is the source's, without the keys of a split model, and with that alignment. Raises
    PackError if the pack is not whole, or the header in it is damaged.
    """
    check_whole(pack)
    dense = list(_dense(pack))
    tensors = [*dense, *_experts(pack)]
    offsets = [0, *accumulate(align(tensor.length, alignment) for tensor in tensors)]
    header = _header(pack, tensors, offsets, alignment)
    placed = []
    for tensor, offset in zip(tensors, offsets, strict=False):
        start = len(header) + offset
        extents = (extent._replace(offset=start + extent.offset) for extent in tensor.extents)
        placed.append(tensor._replace(extents=tuple(extents)))
    return GgufLayout(
        header=header,
        dense=tuple(placed[: len(dense)]),
        experts=tuple(placed[len(dense) :]),
        experts_offset=len(header) + offsets[len(dense)],
        length=len(header) + offsets[-1],
    )


def _dense(pack: Pack) -> Iterator[LaidTensor]:
    for tensor in pack.index.tensors():
        extent = tensor_extent(pack.index, tensor, 0)
        yield LaidTensor(tensor.name, tensor.type_id, tensor.shape, tensor.length, (extent,))


def _experts(pack: Pack) -> Iterator[LaidTensor]:
    for family in pack.index.families:
        for number, kind in enumerate(family.part_kinds):
            whole = ExpertTensor(pack, family, number)
            slices = tuple(whole.extents())
            if kind.origin.first_slice is None:
                length = kind.length * family.expert_count
                shape = (*kind.shape, family.expert_count)
                yield LaidTensor(whole.name, kind.type_id, shape, length, slices)
                continue
            stem = whole.name.removesuffix("_exps.weight")
            for expert, extent in enumerate(slices):
                alone = (extent._replace(offset=0),)
                own_name = f"{stem}.{expert}.weight"
                yield LaidTensor(own_name, kind.type_id, kind.shape, kind.length, alone)


def _header(
    pack: Pack, tensors: Sequence[LaidTensor], offsets: Sequence[int], alignment: int
) -> bytes:
    """Return the header, padded to the first tensor, from which the `offsets` count."""
    data, source = read_first_header(pack)
    kept = [
        bytes(data[start:end])
        for key, (start, end) in source.pairs.items()
        if not key.startswith("split.") and key != _ALIGNMENT_KEY
    ]
    kept.append(_string(_ALIGNMENT_KEY) + struct.pack("<II", _U32_TYPE, alignment))
    table = []
    for tensor, offset in zip(tensors, offsets, strict=False):
        rank = len(tensor.shape)
        place = struct.pack(f"<I{rank}QIQ", rank, *tensor.shape, tensor.type_id, offset)
        table.append(_string(tensor.name) + place)
    start = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(kept))
    header = b"".join((start, *kept, *table))
    return header.ljust(align(len(header), alignment), b"\0")


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    alignment = checked_alignment(settings["alignment"], _LEAST_ALIGNMENT, MAX_ALIGNMENT)
    match = SHARD_NAME.match(target.name)
    if match and int(match["count"]) > 1:
        problem = "the name of one shard of several, and this is the whole model"
        hint = f"name it {shell_word(match['prefix'] + '.gguf')}"
        raise RequestError(problem, path=target, hint=hint)
    layout = lay_out(pack, alignment)
    return ExportPlan(
        folder=target.parent,
        files=(layout.file(target.name, len(pack.file_paths)),),
        heads=lambda _threads, _progress: (layout.header,),
        tensor_count=len(layout.dense) + len(layout.experts),
        alignment=alignment,
        command=shell_words(("llama-server", "-m", str(target))),
    )


def _settings_of(_pack: Pack, path: Path) -> Settings:
    alignment = int(gguf_header.read(path).value("general.alignment"))
    return {"alignment": checked_alignment(alignment, _LEAST_ALIGNMENT, MAX_ALIGNMENT)}


ENGINE = Engine(
    name="gguf",
    title="stock llama.cpp",
    summary="Write a whole pack as one stock GGUF: dense tensors first, experts last by layer.",
    reads="a GGUF",
    writes="one GGUF: dense tensors first, experts last",
    copies="the whole model",
    proof="the same logits: a test",
    is_folder=False,
    needs=lambda _pack, _settings: (),
    plan=_plan,
    settings_of=_settings_of,
    options=(ExportOption("alignment", "size", "Alignment of all tensors.", ALIGNMENT),),
)
