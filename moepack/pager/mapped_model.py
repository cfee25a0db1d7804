"""The files of a model as programs map them: where experts lie in them, and what else is there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from moepack.engines.gguf_layout import GgufLayout, LaidTensor, lay_out
from moepack.errors import PackError
from moepack.format.tables import PackedFamily
from moepack.keys import ExpertKey
from moepack.pager.messages import Do, op
from moepack.pager.page_faults import check_page_faults
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY, is_row_table
from moepack.sizes import align

_PAGE = mmap.PAGESIZE


class PartSpan(NamedTuple):
    """Where a part lies in a file that programs map; `file` counts in `MappedModel.files`."""

    part: str
    file: int
    offset: int
    length: int

    @property
    def first_page(self) -> int:
        """Where the page begins that its first byte is on."""
        return self.offset // _PAGE * _PAGE

    @property
    def room(self) -> int:
        """The bytes of all pages that it has bytes on."""
        return align(self.offset + self.length, _PAGE) - self.first_page

    @property
    def whole_pages(self) -> tuple[int, int]:
        """Where the pages begin and end that are its alone; empty for a short part."""
        start = align(self.offset, _PAGE)
        return start, max(start, (self.offset + self.length) // _PAGE * _PAGE)


Families = dict[str, dict[ExpertKey, tuple[PartSpan, ...]]]
"""By the name of a family and by expert."""


def map_model(pack: Pack) -> MappedShards | MappedImage:
    """Have the model of a pack, or of an index over shards, so that programs can map it.

    Raises PackError for what llama.cpp does not run, MachineError for packs where the system hands
    out no page faults, what reading dense tensors raises, and OSError.
    """
    for family in _families(pack):
        _check_stacked(pack, family)
    if all(file.is_shard for file in pack.index.files):
        return MappedShards(pack)
    return MappedImage(pack)


class MappedShards:
    """The shards of a GGUF as they lie; `path` is the first, which programs open."""

    experts_offset = 0
    image: int | None = None

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._paths = list(pack.file_paths)
        self.path = os.path.abspath(self._paths[0])
        self._descriptors: list[int] = []
        try:
            for path in self._paths:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """The files that may be mapped, opened."""
        return self._descriptors

    def places(self) -> Families:
        """Return where the parts of experts lie that llama.cpp uses."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        places: Families = {}
        for family in _families(self._pack):
            experts = places.setdefault(family.name, {})
            for expert in range(family.expert_count):
                spans = []
                for kind in family.part_kinds:
                    part = self._pack.locate(family.layer, expert, kind.name, family=family.name)
                    spans.append(PartSpan(kind.name, numbers[part.path], part.offset, part.length))
                experts[ExpertKey(family.layer, expert)] = tuple(spans)
        return places

    def lies_alike(self, spans: Iterable[PartSpan]) -> bool:
        """Return whether parts lie in pages as in the files that they are read from."""
        return True

    def begin_edges(self, spans: Iterable[PartSpan]) -> None:
        """Have the system read the pages that parts share with others: programs have its own.

        Else these would be read when a program comes to them, one after another.
        """
        for span in spans:
            start, end = span.whole_pages
            for offset, length in (
                (span.first_page, start - span.first_page),
                (end, span.first_page + span.room - end),
            ):
                if length:
                    os.posix_fadvise(
                        self._descriptors[span.file], offset, length, os.POSIX_FADV_WILLNEED
                    )

    def position(self, key: ExpertKey) -> tuple[object, ...]:
        """Return by what experts are sorted that are read in the order of their files."""
        return key

    def prepare(self, file: int) -> Iterator[bytes]:
        """Yield what a program is to do with a file that it has just mapped: to read dense tensors.

        libllama asks for all of the file ahead; experts are no part of that.
        """
        path = self._paths[file]
        for tensor in self._pack.dense():
            if tensor.path == path and tensor.length and not is_row_table(tensor.name):
                start = tensor.offset // _PAGE * _PAGE
                end = tensor.offset + tensor.length
                yield op(Do.WANTED, file=file, offset=start, length=end - start)

    def close(self) -> None:
        """Close all files; what programs have mapped stays."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class MappedImage:
    """A pack as one GGUF, which has no name: header, dense tensors of the pack's files, experts.

    A GGUF with holes must never be where another program could load it: llama.cpp would answer
    nonsense without a word. So what has a path here ends a byte behind the header; the preloaded
    library maps the whole image in its place.
    """

    def __init__(self, pack: Pack) -> None:
        check_page_faults()
        self._pack = pack
        self._layout: GgufLayout = lay_out(pack, _PAGE)
        self.experts_offset = self._layout.experts_offset
        self._open: list[int] = []
        self._files: dict[int, int] = {}
        try:
            self._stub = self._memory("moepack-model", len(self._layout.header) + 1)
            self.image: int = self._memory("moepack-image", self._layout.length)
            self._copy_unaligned()
        except BaseException:
            self.close()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._stub}"

    def _memory(self, name: str, length: int) -> int:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._open.append(descriptor)
        os.pwrite(descriptor, self._layout.header, 0)
        os.ftruncate(descriptor, length)
        return descriptor

    @property
    def descriptors(self) -> list[int]:
        """The files that may be mapped, opened: the whole image, and what has its path."""
        return [self.image, self._stub]

    def _copy_unaligned(self) -> None:
        """Copy dense tensors that begin on no page of their file, as those of shards do."""
        lost = [tensor for tensor in self._layout.dense if tensor.length and not _on_page(tensor)]
        if not lost:
            return
        memory = mmap.mmap(self.image, self.experts_offset)
        with self._pack.reader(backend="buffered") as reader, memoryview(memory) as view:
            for tensor in lost:
                (extent,) = tensor.extents
                with view[extent.offset : extent.end] as place:
                    reader.read_dense_into(place, tensor.name)
        memory.close()

    def places(self) -> Families:
        """Return where the parts of experts lie in the image."""
        tensors = {tensor.name: tensor.extents for tensor in self._layout.experts}
        places: Families = {}
        for family in _families(self._pack):
            starts = [tensors[f"blk.{family.layer}.{kind.name}"] for kind in family.part_kinds]
            experts = places.setdefault(family.name, {})
            for expert in range(family.expert_count):
                experts[ExpertKey(family.layer, expert)] = tuple(
                    PartSpan(kind.name, 0, slices[expert].offset, kind.length)
                    for kind, slices in zip(family.part_kinds, starts, strict=True)
                )
        return places

    def lies_alike(self, spans: Iterable[PartSpan]) -> bool:
        """Return whether parts lie in pages as in the pack, where each begins on one."""
        return all(span.offset % _PAGE == span.length % _PAGE == 0 for span in spans)

    def begin_edges(self, spans: Iterable[PartSpan]) -> None:
        """Do nothing: pages that parts share are copied for programs."""

    def position(self, key: ExpertKey) -> tuple[object, ...]:
        """Return by what experts are sorted that are read in the order of their files."""
        blob = self._pack.locate(key.layer, key.expert, family=ROUTED_FAMILY)
        return blob.path, blob.offset

    def prepare(self, file: int) -> Iterator[bytes]:
        """Yield what a program is to do with the image: to map dense tensors.

        It is one mapping for tensors that follow each other in the pack as in the image.
        """
        start = source = length = number = 0
        for tensor in self._layout.dense:
            if not tensor.length or not _on_page(tensor):
                continue
            (extent,) = tensor.extents
            pages = align(extent.length, _PAGE)
            is_next = (extent.input, extent.input_offset) == (number, source + length)
            if length and is_next and extent.offset == start + length:
                length += pages
                continue
            if length:
                yield self._dense(start, length, number, source)
            start, source, length, number = extent.offset, extent.input_offset, pages, extent.input
        if length:
            yield self._dense(start, length, number, source)

    def _dense(self, start: int, length: int, number: int, source: int) -> bytes:
        if number not in self._files:
            self._files[number] = os.open(self._pack.file_paths[number], os.O_RDONLY | os.O_CLOEXEC)
            self._open.append(self._files[number])
        return op(Do.DENSE, expert=self._files[number], offset=start, length=length, source=source)

    def close(self) -> None:
        """Close all files; what programs have mapped stays."""
        while self._open:
            os.close(self._open.pop())


MappedModel = MappedShards | MappedImage


def _families(pack: Pack) -> Iterator[PackedFamily]:
    layers = pack.shape.without_mtp().layers
    return (family for family in pack.index.families if family.layer in layers)


def _on_page(tensor: LaidTensor) -> bool:
    (extent,) = tensor.extents
    return extent.input_offset % _PAGE == 0


def _check_stacked(pack: Pack, family: PackedFamily) -> None:
    if any(kind.origin.first_slice is not None for kind in family.part_kinds):
        raise PackError(
            "each expert is a tensor of its own, as in GGUFs before April 2024",
            path=pack.path,
            place=f"layer {family.layer}",
            hint="convert the model anew: llama.cpp does not run such files any more",
        )


def slot_room(spans: tuple[PartSpan, ...]) -> int:
    """Return the bytes of a slot for an expert: the same for all experts of a layer."""
    return sum(align(span.length, _PAGE) + (_PAGE if _may_straddle(span) else 0) for span in spans)


def _may_straddle(span: PartSpan) -> bool:
    return bool(span.offset % _PAGE or span.length % _PAGE)


def slot_places(spans: tuple[PartSpan, ...]) -> Mapping[str, int]:
    """Return where each part begins in a slot: as far behind the start of a page as in its file."""
    places = {}
    offset = 0
    for span in spans:
        places[span.part] = offset + span.offset - span.first_page
        offset += span.room
    return places
