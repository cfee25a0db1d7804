"""Plans of reading an expert or a dense tensor, made by the catalogue alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.common.errors import RequestError
from moepack.common.sizes import align
from moepack.pack.reading.expert_read import PAGE, ExpertRead, FileRead
from moepack.pack.reading.locations import PartSpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moepack.pack.reading.catalog import Catalog, PartNames
    from moepack.pack.reading.locations import PartLocation, TensorLocation

_PIECE_LENGTH = 16 << 20
"""The bytes of one read of a dense tensor, which may be larger than one read can be."""


def plan_read(
    catalog: Catalog, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> ExpertRead:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts with no more than padding between them are one read; so are, in an index over shards,
    parts within a page of each other. Raises RequestError for an expert or part that the pack does
    not have, PackError for a record that breaks the format.
    """
    if parts is None:
        blob = catalog.locate_all(layer, expert, family=family)
        if blob is not None:
            path, offset, length, spans = blob
            names = catalog.part_names(layer, family=family)
            file_reads = (FileRead(path, offset, length, 0),)
            return ExpertRead(layer, expert, True, spans, names, file_reads, length)
        parts = [kind.name for kind in catalog.parts(layer, family=family)]
    if not parts:
        raise RequestError("no parts were requested", path=catalog.path)
    names = catalog.part_names(layer, family=family)
    locations = {catalog.locate(layer, expert, part, family=family) for part in parts}
    gap = max(catalog.index.header.part_alignment, PAGE)
    return read_of_parts(layer, expert, locations, names, gap)


def read_of_parts(
    layer: int, expert: int, parts: Iterable[PartLocation], names: PartNames, gap: int
) -> ExpertRead:
    """Plan the reads of some parts of an expert, wherever they lie.

    Parts of a file with less than `gap` bytes between them are one read.
    """
    reads: list[FileRead] = []
    spans = []
    for part in sorted(parts, key=lambda part: (part.path, part.offset)):
        last = reads[-1] if reads else None
        is_near = last is not None and part.path == last.path
        if last and is_near and 0 <= part.offset - last.offset - last.length < gap:
            reads[-1] = last._replace(length=part.offset + part.length - last.offset)
        else:
            start = 0
            if last:  # In pages of its own, and as far behind the start of one as in the file.
                lead = reads[0].lead
                start = align(lead + last.start + last.length, PAGE) - lead + part.offset % PAGE
            reads.append(FileRead(part.path, part.offset, part.length, start))
        start = reads[-1].start + part.offset - reads[-1].offset
        spans.append(PartSpan(part.part, start, part.length, part.digest))
    length = reads[-1].start + reads[-1].length
    return ExpertRead(layer, expert, False, tuple(spans), names, tuple(reads), length)


def plan_tensor(tensor: TensorLocation) -> ExpertRead:
    """Plan the reads of a dense tensor into one range of memory, in pieces in flight together."""
    span = PartSpan(tensor.name, 0, tensor.length, tensor.digest)
    starts = range(0, tensor.length, _PIECE_LENGTH) or range(1)
    reads = tuple(
        FileRead(
            tensor.path, tensor.offset + start, min(_PIECE_LENGTH, tensor.length - start), start
        )
        for start in starts
    )
    return ExpertRead(-1, -1, False, (span,), {}, reads, tensor.length)
