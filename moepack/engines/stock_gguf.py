"""One stock GGUF of a whole pack: dense tensors first, experts last and by layer, page-aligned.

llama.cpp maps a file from its first to its last tensor of a kind, so dense tensors first keep these
windows small, and experts on pages can be read past the page cache without a copy. Tensors follow
each other without gaps, as llama.cpp demands (ggml/src/gguf.cpp, b11549); so the slices of an
expert stay apart. The format: ggml/docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moepack import digest
from moepack.errors import PackError, RequestError
from moepack.format.tables import PackedFamily, PartKind
from moepack.reading.pack import Pack
from moepack.reading.shard_map import check_whole
from moepack.sizes import align, size_text
from moepack.source import gguf_header
from moepack.source.gguf_header import GgufHeader
from moepack.storage.extents import Extent, NewFile
from moepack.storage.inputs import InputFile, Inputs
from moepack.storage.whole_files import Progress, write_whole_files

ALIGNMENT = 4096
MAX_ALIGNMENT = 1 << 21
_VERSION = 3
_U32_TYPE = 4
_ALIGNMENT_KEY = "general.alignment"


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The file that was exported, and how; lengths in bytes.

    `cloned_length` is shared with the pack, `kept_length` was there from an interrupted run.
    `has_digests` says that every part was compared with its digest.
    """

    path: str
    tensor_count: int
    alignment: int
    length: int
    cloned_length: int
    kept_length: int
    has_digests: bool


class _Tensor(NamedTuple):
    """A tensor of the new file: `extents` have offsets from its own start."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    extents: tuple[Extent, ...]


def export_gguf(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    alignment: int = ALIGNMENT,
    resume: bool = False,
    force: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> ExportSummary:
    """Write the model of a whole pack as one GGUF that stock llama.cpp loads.

    Metadata is the source's, without what says that it was split, and with `alignment` (bytes) for
    all tensors. Every part whose digest is known is compared with it on the way; ranges are shared
    with the pack where the file system can. With `resume` an interrupted run is continued, with
    `force` a file at `target` is replaced. `progress` is as for `restore`.

    Raises PackError where the pack is not whole or its bytes are not right, RequestError for a file
    that is there already, MachineError for a machine that cannot.
    """
    if alignment.bit_count() != 1 or not 32 <= alignment <= MAX_ALIGNMENT:
        expected = f"a power of two from 32 B to {size_text(MAX_ALIGNMENT)}"
        raise RequestError("not an alignment", expected=expected, found=f"{alignment:,} bytes")
    path = Path(target)
    with Pack(pack) as opened:
        check_whole(opened)
        tensors = [*_dense(opened), *_experts(opened)]
        data = _header(opened, tensors, alignment)
        has_digests = all(file.has_digests for file in opened.index.files)
        new = _NewGguf(data, tensors, alignment, len(opened.file_paths))
        result = write_whole_files(
            path.parent,
            [NewFile(path.name, new.length, new.extents)],
            opened.file_paths,
            data=(data,),
            resume=resume,
            force=force,
            threads=threads,
            progress=progress,
        )
    return ExportSummary(
        path=os.fspath(target),
        tensor_count=len(tensors),
        alignment=alignment,
        length=result.length,
        cloned_length=result.cloned_length,
        kept_length=result.kept_length,
        has_digests=has_digests,
    )


class _NewGguf:
    """Where everything lies in the new file; its header is input number `header_input`."""

    def __init__(
        self, header: bytes, tensors: Sequence[_Tensor], alignment: int, header_input: int
    ) -> None:
        self._header = header
        self._tensors = tensors
        self._alignment = alignment
        self._header_input = header_input
        self.length = len(header) + sum(align(tensor.length, alignment) for tensor in tensors)

    def extents(self) -> Iterator[Extent]:
        """Yield the header and all tensors, in the order of their offsets."""
        length = len(self._header)
        known = digest.of(self._header)
        yield Extent(0, length, self._header_input, 0, known, "header")
        offset = length
        for tensor in self._tensors:
            for extent in tensor.extents:
                yield extent._replace(offset=offset + extent.offset)
            offset += align(tensor.length, self._alignment)


def _dense(pack: Pack) -> Iterator[_Tensor]:
    for tensor in pack.index.tensors():
        known = pack.index.files[tensor.file].known(tensor.digest)
        place = (0, tensor.length, tensor.file, tensor.offset)
        extent = Extent(*place, known, f"tensor {tensor.name}")
        yield _Tensor(tensor.name, tensor.type_id, tensor.shape, tensor.length, (extent,))


def _experts(pack: Pack) -> Iterator[_Tensor]:
    for family in pack.index.families:
        for number, kind in enumerate(family.part_kinds):
            slices = tuple(_slices(pack, family, number, kind))
            name = f"blk.{family.layer}.{kind.name}"
            if kind.origin.first_slice is None:
                length = kind.length * family.expert_count
                shape = (*kind.shape, family.expert_count)
                yield _Tensor(name, kind.type_id, shape, length, slices)
                continue
            stem = name.removesuffix("_exps.weight")
            for expert, extent in enumerate(slices):
                alone = (extent._replace(offset=0),)
                own_name = f"{stem}.{expert}.weight"
                yield _Tensor(own_name, kind.type_id, kind.shape, kind.length, alone)


def _slices(pack: Pack, family: PackedFamily, number: int, kind: PartKind) -> Iterator[Extent]:
    """Yield one part of all experts, one behind the other."""
    count = len(family.part_kinds)
    for expert in range(family.expert_count):
        record = pack.index.part(family.first_part + expert * count + number, kind)
        offset, length, stated, file, _ = record
        label = f"layer {family.layer} expert {expert} {kind.name}"
        known = pack.index.files[file].known(stated)
        yield Extent(expert * length, length, file, offset, known, label)


def _header(pack: Pack, tensors: Sequence[_Tensor], alignment: int) -> bytes:
    """Return the header of the new file, padded to where its first tensor begins."""
    data, source = _source_header(pack)
    kept = [
        bytes(data[start:end])
        for key, (start, end) in source.pairs.items()
        if not key.startswith("split.") and key != _ALIGNMENT_KEY
    ]
    kept.append(_string(_ALIGNMENT_KEY) + struct.pack("<II", _U32_TYPE, alignment))
    start = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(kept))
    header = b"".join((start, *kept, *_table(tensors, alignment)))
    return header.ljust(align(len(header), alignment), b"\0")


def _source_header(pack: Pack) -> tuple[memoryview, GgufHeader]:
    """Return the bytes of the first shard's header, which has the metadata, and what they say."""
    held = next(
        (held for held in pack.index.shard_bytes() if not held.shard and not held.shard_offset),
        None,
    )
    if held is None:
        raise PackError("the header of the first shard is missing", path=pack.index.path)
    path = pack.file_paths[held.file]
    with Inputs([InputFile(str(path))], PackError) as inputs:
        data = inputs.read(0, held.offset, held.length)
    computed = digest.of(data)
    if computed != held.digest:
        raise PackError(
            "the bytes do not have the digest in the index",
            path=path,
            place=f"header of shard 1 at byte {held.offset:,}",
            expected=digest.to_text(held.digest),
            found=digest.to_text(computed),
            hint="run `moepack verify` on the pack",
        )
    shard = pack.manifest.source.shards[0]
    return memoryview(data), gguf_header.parse(data, os.fspath(path), shard.length)


def _table(tensors: Iterable[_Tensor], alignment: int) -> Iterator[bytes]:
    """Yield the lines of the tensor table; offsets count from the start of the tensor data."""
    offset = 0
    for tensor in tensors:
        rank = len(tensor.shape)
        yield _string(tensor.name)
        yield struct.pack(f"<I{rank}QIQ", rank, *tensor.shape, tensor.type_id, offset)
        offset += align(tensor.length, alignment)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
