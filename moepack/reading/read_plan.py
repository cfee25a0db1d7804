"""Which reads bring an expert, or a dense tensor: planned once, by the catalogue alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.errors import RequestError
from moepack.reading.decoded_read import DecodedRead
from moepack.reading.expert_read import PAGE, ExpertRead, FileRead
from moepack.reading.locations import PartSpan
from moepack.sizes import align

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moepack.reading.catalog import Catalog, PartNames
    from moepack.reading.locations import PartLocation, TensorLocation

_PIECE_LENGTH = 16 << 20
"""Of a dense tensor, which may be larger than one read can be."""


def plan_read(
    catalog: Catalog, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> ExpertRead:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts that lie so near each other that padding could be between them are one read; so are, in an
    index over shards, those within a page of each other. Raises
    RequestError for what the pack does not hold, PackError for a record that breaks the format.
    """
    if parts is None:
        blob = catalog.locate_all(layer, expert, family=family)
        if blob is not None:
            path, offset, length, spans = blob
            names = catalog.part_names(layer, family=family)
            file_reads = (FileRead(path, offset, length, 0),)
            return ExpertRead(layer, expert, True, spans, names, file_reads, length)
        parts = [kind.name for kind in catalog.parts(layer, family=family)]
    if isinstance(parts, str):
        raise RequestError("one name where several go", expected=f"parts=({parts!r},)", found=parts)
    if not parts:
        raise RequestError("no parts were asked for", path=catalog.path)
    names = catalog.part_names(layer, family=family)
    locations = {catalog.locate(layer, expert, part, family=family) for part in parts}
    gap = max(catalog.index.header.part_alignment, PAGE)
    return read_of_parts(layer, expert, locations, names, gap)


def read_of_parts(
    layer: int, expert: int, parts: Iterable[PartLocation], names: PartNames, gap: int
) -> ExpertRead:
    """Plan the reads of some parts of an expert, wherever they lie.

    Parts of a file with less than `gap` bytes between them are one read. Those that are stored by a
    codec are read apart from the others, and decoded behind these in memory.
    """
    ordered = sorted(parts, key=lambda part: (part.path, part.offset))
    stored = [part for part in ordered if part.codec]
    if not stored:
        return _plain(layer, expert, ordered, names, gap)
    as_it_is = [part for part in ordered if not part.codec]
    plain = _plain(layer, expert, as_it_is, names, gap) if as_it_is else None
    bare = [part._replace(length=part.stored_length, digest=None) for part in stored]
    frames = _plain(layer, expert, bare, names, gap)
    return _decoded(plain, frames, stored)


def _decoded(
    plain: ExpertRead | None, frames: ExpertRead, stored: Sequence[PartLocation]
) -> ExpertRead:
    """Plan what `frames` are decoded to, each on a page behind what is `plain`."""
    spans = list(plain.parts) if plain else []
    lead, end = (plain.lead, plain.length) if plain else (0, 0)
    for part in stored:
        start = align(lead + end, PAGE) - lead
        spans.append(PartSpan(part.part, start, part.length, part.digest))
        end = start + part.length
    file_reads = (*(plain.file_reads if plain else ()), *frames.file_reads)
    owner = (frames.layer, frames.expert, False)
    return DecodedRead(*owner, tuple(spans), frames.names, file_reads, end, frames)


def _plain(
    layer: int, expert: int, ordered: Sequence[PartLocation], names: PartNames, gap: int
) -> ExpertRead:
    """Plan the reads of parts that are taken as they lie, in the order of their places."""
    reads: list[FileRead] = []
    spans = []
    for part in ordered:
        if reads and 0 <= _gap(reads[-1], part) < gap:
            last = reads.pop()
            end = part.offset + part.stored_length
            reads.append(last._replace(length=end - last.offset))
        else:
            reads.append(_next_read(reads, part))
        start = reads[-1].start + part.offset - reads[-1].offset
        spans.append(PartSpan(part.part, start, part.length, part.digest))
    length = reads[-1].start + reads[-1].length
    return ExpertRead(layer, expert, False, tuple(spans), names, tuple(reads), length)


def _next_read(before: list[FileRead], part: PartLocation) -> FileRead:
    if not before:
        return FileRead(part.path, part.offset, part.stored_length, 0)
    # In pages of its own, and as far behind the start of one as in the file.
    lead = before[0].lead
    end = align(lead + before[-1].start + before[-1].length, PAGE)
    return FileRead(part.path, part.offset, part.stored_length, end - lead + part.offset % PAGE)


def _gap(file_read: FileRead, part: PartLocation) -> int:
    """Count the bytes between a read and a part behind it; -1 for one in another file."""
    if part.path != file_read.path:
        return -1
    return part.offset - file_read.offset - file_read.length


class TensorRead(ExpertRead):
    """What is to be read of one dense tensor, in pieces that can be in flight together."""

    __slots__ = ()

    @property
    def owner(self) -> str:
        """What a message calls it."""
        return "tensor"

    def place(self, file_read: FileRead) -> str:
        """Return what a message calls one of the reads."""
        return f"tensor {self.parts[0].name} at byte {file_read.offset:,}"


def plan_tensor(tensor: TensorLocation) -> TensorRead:
    """Plan the reads of a dense tensor into one range of memory."""
    span = PartSpan(tensor.name, 0, tensor.length, tensor.digest)
    starts = range(0, tensor.length, _PIECE_LENGTH) or range(1)
    reads = tuple(
        FileRead(
            tensor.path, tensor.offset + start, min(_PIECE_LENGTH, tensor.length - start), start
        )
        for start in starts
    )
    return TensorRead(-1, -1, False, (span,), {}, reads, tensor.length)


def plan_blob(catalog: Catalog, layer: int, expert: int, family: str | None) -> ExpertRead:
    """Plan to read an expert's blob as it lies, with nothing decoded; its parts without a blob."""
    if not catalog.index.codecs:
        return plan_read(catalog, layer, expert, None, family)
    blob = catalog.locate(layer, expert, family=family)
    names = catalog.part_names(layer, family=family)
    file_reads = (FileRead(blob.path, blob.offset, blob.length, 0),)
    return ExpertRead(layer, expert, True, (), names, file_reads, blob.length)
