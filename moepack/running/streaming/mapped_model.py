"""The files of a model as programs map them: the spans of experts, and all else."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from moepack.common.errors import PackError
from moepack.common.shape import ExpertKey, is_row_table
from moepack.common.sizes import align, size_text
from moepack.pack.engines.stock_gguf import GgufLayout, LaidTensor, lay_out
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.reading.pack import Pack
from moepack.storage.regular_file import map_file, open_regular

_PAGE = mmap.PAGESIZE


class MappedSpan(NamedTuple):
    """The bytes of a part in a file that programs map; `file` counts in `descriptors`."""

    part: str
    file: int
    offset: int
    length: int


class DenseRange(NamedTuple):
    """Bytes of dense tensors as programs map them.

    Of a shard they are read ahead; of an image they are mapped from `offset` of the pack's file
    with the number `source`.
    """

    file: int
    mapped_offset: int
    length: int
    source: int = 0
    offset: int = 0


Spans = tuple[MappedSpan, ...]
FamilySpans = dict[str, dict[ExpertKey, Spans]]
"""By the name of a family and by expert."""


def map_model(pack: Pack) -> MappedModel:
    """Return the model of a pack, or of an index over shards, as programs can map it.

    Raises PackError for a model that llama.cpp does not run, what reading dense tensors raises, and
    OSError.
    """
    for family in pack.index.families:
        if any(kind.origin.first_slice is not None for kind in family.part_kinds):
            raise PackError(
                "each expert is a tensor of its own, as in GGUFs before April 2024",
                path=pack.path,
                place=f"layer {family.layer}",
                hint="convert the model again: llama.cpp no longer runs such files",
            )
    if all(file.is_shard for file in pack.index.files):
        return MappedShards(pack)
    return MappedImage(pack)


class MappedShards:
    """The shards of a GGUF as they lie; `path` is the first, which programs open."""

    experts_offset = 0
    image: int | None = None
    length = 0

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._paths = list(pack.file_paths)
        self.path = os.path.abspath(self._paths[0])
        self.descriptors: list[int] = []
        """The files that may be mapped, opened."""
        try:
            for path in self._paths:
                self.descriptors.append(open_regular(path))
        except BaseException:
            self.close()
            raise

    def spans(self) -> FamilySpans:
        """Return the spans of all experts."""
        numbers = {path: number for number, path in enumerate(self._paths)}

        def span(family: PackedFamily, expert: int, kind: PartKind) -> MappedSpan:
            part = self._pack.locate(family.layer, expert, kind.name, family=family.name)
            return MappedSpan(kind.name, numbers[part.path], part.offset, part.length)

        return _spans(self._pack, span)

    def dense(self) -> Iterator[DenseRange]:
        """Yield the ranges of dense tensors: libllama reads all of a file ahead, with experts."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        for tensor in self._pack.dense():
            if tensor.path in numbers and tensor.length and not is_row_table(tensor.name):
                yield DenseRange(numbers[tensor.path], tensor.offset, tensor.length)

    def close(self) -> None:
        """Close all files; programs keep their mappings."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class MappedImage:
    """A pack as one GGUF, which has no name: header, dense tensors of the pack's files, experts.

    A GGUF with holes must never be where another program could load it: llama.cpp would answer
    nonsense without a word. So the file with a path ends a byte behind the header; the preloaded
    library maps the whole image in its place.
    """

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._layout: GgufLayout = lay_out(pack, _PAGE)
        self.experts_offset = self._layout.experts_offset
        self.length = self._layout.length
        self._open: list[int] = []
        self._files: dict[int, int | None] = {}
        """The pack's files with dense tensors, opened; None for those that cannot be mapped."""
        try:
            stub = self._memory("moepack-model", len(self._layout.header) + 1)
            self.image: int = self._memory("moepack-image", self._layout.length)
            self._copy_unmapped()
        except BaseException:
            self.close()
            raise
        self.descriptors = [self.image, stub]
        """The files that may be mapped, opened: the whole image, and the file with a path."""
        self.path = f"/proc/{os.getpid()}/fd/{stub}"

    def _memory(self, name: str, length: int) -> int:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._open.append(descriptor)
        os.pwrite(descriptor, self._layout.header, 0)
        os.ftruncate(descriptor, length)
        return descriptor

    def _copy_unmapped(self) -> None:
        """Copy dense tensors that begin on no page of their file, as those of shards do.

        Also all of those on a file system that maps no files, with a warning.
        """
        tensors = [one for one in self._layout.dense if one.length and not self._is_mapped(one)]
        length = sum(one.length for one in tensors if _on_page(one))
        if length:
            problem = f"{self._pack.path}: its file system maps no files"
            text = f"{problem}: dense tensors of {size_text(length)} are read into memory"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if not tensors:
            return
        memory = mmap.mmap(self.image, self.experts_offset)
        with self._pack.reader(backend="buffered") as reader, memoryview(memory) as view:
            for tensor in tensors:
                (extent,) = tensor.extents
                with view[extent.offset : extent.end] as piece:
                    reader.read_dense_into(piece, tensor.name)
        memory.close()

    def spans(self) -> FamilySpans:
        """Return the spans of all experts in the image."""
        tensors = {tensor.name: tensor.extents for tensor in self._layout.experts}

        def span(family: PackedFamily, expert: int, kind: PartKind) -> MappedSpan:
            extent = tensors[f"blk.{family.layer}.{kind.name}"][expert]
            return MappedSpan(kind.name, 0, extent.offset, kind.length)

        return _spans(self._pack, span)

    def dense(self) -> Iterator[DenseRange]:
        """Yield the ranges of dense tensors, in whole pages."""
        for tensor in self._layout.dense:
            if tensor.length and self._is_mapped(tensor):
                (extent,) = tensor.extents
                length = align(extent.length, _PAGE)
                yield DenseRange(0, extent.offset, length, extent.input, extent.input_offset)

    def _is_mapped(self, tensor: LaidTensor) -> bool:
        """Return whether programs map a dense tensor in the pack's file."""
        (extent,) = tensor.extents
        if not _on_page(tensor):
            return False
        if extent.input not in self._files:
            file = open_regular(self._pack.file_paths[extent.input])
            self._open.append(file)
            mapped = map_file(file)
            self._files[extent.input] = None if mapped is None else file
        return self._files[extent.input] is not None

    def close(self) -> None:
        """Close all files; programs keep their mappings."""
        while self._open:
            os.close(self._open.pop())


MappedModel = MappedShards | MappedImage


def _spans(pack: Pack, span: Callable[[PackedFamily, int, PartKind], MappedSpan]) -> FamilySpans:
    families: FamilySpans = {}
    for family in pack.index.families:
        experts = families.setdefault(family.name, {})
        for expert in range(family.expert_count):
            spans = tuple(span(family, expert, kind) for kind in family.part_kinds)
            experts[ExpertKey(family.layer, expert)] = spans
    return families


def _on_page(tensor: LaidTensor) -> bool:
    (extent,) = tensor.extents
    return extent.input_offset % _PAGE == 0
