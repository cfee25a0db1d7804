"""Data files that are written, and where everything lies in them: what the index is made of.

A file has its parts as they are, where the plan says; or some of them were stored by a codec, and
those behind them moved up.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from moepack.packing.plan import BlobKey, Plan, PlannedFile, place_parts
from moepack.storage.extents import Extent, NewFile


class StoredParts(NamedTuple):
    """The bytes that each part of a file takes there, and their digests, in order."""

    lengths: array[int]
    digests: array[int]


class FinishedFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets.

    `stored` is None where all of them are stored as they are, as the plan says.
    """

    name: str
    digests: array[int]
    stored: StoredParts | None = None


class PlacedPart(NamedTuple):
    """Where a part lies, as in its record; `stored_digest` is that of the bytes there."""

    offset: int
    stored_length: int
    digest: int
    stored_digest: int
    is_coded: bool


class PlacedBlob(NamedTuple):
    """Where a blob lies, and its parts in order."""

    key: BlobKey
    offset: int
    length: int
    parts: tuple[PlacedPart, ...]

    @property
    def end(self) -> int:
        """Where it ends in its file."""
        return self.offset + self.length


def placed_blobs(plan: Plan, file: PlannedFile, finished: FinishedFile) -> Iterator[PlacedBlob]:
    """Yield the blobs of a finished file in the order of their offsets."""
    offset = first = 0
    for blob in file.blobs:
        template = plan.templates[blob.template]
        numbers = range(first, first + len(template.parts))
        lengths = [part.length for part in template.parts]
        offsets, length = template.offsets_in_blob, template.length
        digests = stored_digests = finished.digests[first : numbers.stop]
        if finished.stored is not None:
            stored_lengths = finished.stored.lengths[first : numbers.stop]
            stored_digests = finished.stored.digests[first : numbers.stop]
            offsets, length = place_parts(template.parts, stored_lengths, plan.layout)
        else:
            stored_lengths = array("Q", lengths)
        parts = tuple(
            PlacedPart(
                offset + offsets[number],
                stored_lengths[number],
                digests[number],
                stored_digests[number],
                stored_lengths[number] < lengths[number],
            )
            for number in range(len(lengths))
        )
        yield PlacedBlob(blob.key, offset, length, parts)
        offset += length
        first = numbers.stop


def has_codecs(plan: Plan, finished: Mapping[str, FinishedFile]) -> bool:
    """Return whether any part of the finished files is stored by a codec."""
    return any(
        part.is_coded
        for file in plan.files
        if finished[file.name].stored is not None
        for blob in placed_blobs(plan, file, finished[file.name])
        for part in blob.parts
    )


def on_disk(plan: Plan, file: NewFile, finished: FinishedFile) -> NewFile:
    """Return a finished file as it lies on the disk: its length, and the digests of its extents."""
    if finished.stored is None:
        return file._replace(extents=partial(_with_digests, file, finished.digests))
    planned = next(planned for planned in plan.files if planned.name == file.name)
    length = max(blob.end for blob in placed_blobs(plan, planned, finished))
    return NewFile(file.name, length, partial(_as_stored, plan, planned, finished))


def _with_digests(file: NewFile, digests: Sequence[int]) -> Iterator[Extent]:
    for extent, known in zip(file.extents(), digests, strict=True):
        yield extent._replace(digest=known)


def _as_stored(plan: Plan, file: PlannedFile, finished: FinishedFile) -> Iterator[Extent]:
    for blob in placed_blobs(plan, file, finished):
        for part in blob.parts:
            yield Extent(part.offset, part.stored_length, 0, 0, part.stored_digest)


def makes_sense(file: NewFile, finished: FinishedFile, is_stored: bool) -> bool:
    """Return whether what is known of a finished file is of just these extents.

    `is_stored` says whether it has to be known how its parts are stored.
    """
    lengths = [extent.length for extent in file.extents()]
    if len(finished.digests) != len(lengths) or is_stored != (finished.stored is not None):
        return False
    if finished.stored is None:
        return True
    stored_lengths, stored_digests = finished.stored
    return len(stored_lengths) == len(stored_digests) == len(lengths) and all(
        0 < stored <= length for stored, length in zip(stored_lengths, lengths, strict=True)
    )
