"""Data files that are written, the offsets of all parts in them, and the index of these.

A file has its parts as they are, as planned; or some of them were stored by a codec, and those
behind them moved up.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import lt
from typing import Any, NamedTuple

from moepack.pack.format.contents import BlobKey
from moepack.pack.format.index_encoder import IndexWriter
from moepack.pack.format.tables import DataFile
from moepack.packing.plan.plan import DENSE_NAME, Plan, PlannedFile, place_parts
from moepack.storage.extents import Extent, NewFile


class StoredParts(NamedTuple):
    """The bytes that each part of a file takes there, and their digests, in order."""

    lengths: array[int]
    digests: array[int]


class FinishedFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets.

    `stored` is None if all of them are stored as they are, as the plan says.
    """

    name: str
    digests: array[int]
    stored: StoredParts | None = None


def to_json(file: FinishedFile) -> dict[str, str]:
    """Return a finished file as journals and records state it."""
    entry = {"name": file.name, "digests": file.digests.tobytes().hex()}
    if file.stored is not None:
        entry["stored_lengths"] = file.stored.lengths.tobytes().hex()
        entry["stored_digests"] = file.stored.digests.tobytes().hex()
    return entry


def from_json(entry: Mapping[str, Any]) -> FinishedFile:
    """Read a finished file; raise KeyError, TypeError or ValueError if it makes no sense."""
    stored = None
    if "stored_lengths" in entry:
        lengths, digests = entry["stored_lengths"], entry["stored_digests"]
        stored = StoredParts(_numbers(lengths), _numbers(digests))
    return FinishedFile(str(entry["name"]), _numbers(entry["digests"]), stored)


def _numbers(text: str) -> array[int]:
    return array("Q", bytes.fromhex(text))


class WrittenPart(NamedTuple):
    """A part in its file, as in its record; `stored_digest` is that of the bytes there."""

    offset: int
    stored_length: int
    digest: int
    stored_digest: int
    is_coded: bool


class WrittenBlob(NamedTuple):
    """A blob in its file, and its parts in order."""

    key: BlobKey
    offset: int
    length: int
    parts: tuple[WrittenPart, ...]


def written_blobs(plan: Plan, file: PlannedFile, finished: FinishedFile) -> Iterator[WrittenBlob]:
    """Yield the blobs of a finished file in the order of their offsets."""
    offset = first = 0
    for key in file.blobs:
        template = plan.templates[key.template]
        lengths = [part.length for part in template.parts]
        end = first + len(lengths)
        offsets, length = template.offsets_in_blob, template.length
        stored_lengths: Sequence[int] = lengths
        digests = stored_digests = finished.digests[first:end]
        if finished.stored is not None:
            stored_lengths = finished.stored.lengths[first:end]
            stored_digests = finished.stored.digests[first:end]
            offsets, length = place_parts(template.parts, stored_lengths, plan.layout)
        parts = tuple(
            WrittenPart(
                offset + offsets[number],
                stored_lengths[number],
                digests[number],
                stored_digests[number],
                stored_lengths[number] < lengths[number],
            )
            for number in range(len(lengths))
        )
        yield WrittenBlob(key, offset, length, parts)
        offset += length
        first = end


def has_codecs(plan: Plan, finished: Mapping[str, FinishedFile]) -> bool:
    """Return whether any part of the finished files is stored by a codec."""
    for file in plan.files:
        stored = finished[file.name].stored
        if stored is not None:
            lengths = (extent.length for extent in plan.extents(file))
            if any(map(lt, stored.lengths, lengths)):
                return True
    return False


def on_disk(plan: Plan, file: NewFile, finished: FinishedFile) -> NewFile:
    """Return a finished file as it lies on the disk: its length, and the digests of its extents."""
    if finished.stored is None:
        return file._replace(extents=partial(_with_digests, file, finished.digests))
    planned = next(planned for planned in plan.files if planned.name == file.name)
    length = sum(blob.length for blob in written_blobs(plan, planned, finished))
    return NewFile(file.name, length, partial(_stored_extents, plan, planned, finished))


def encode_index(plan: Plan, finished: Mapping[str, FinishedFile]) -> bytes:
    """Return the bytes of the index of a pack with the files `finished`."""
    files = [on_disk(plan, file, finished[file.name]) for file in plan.new_files()]
    data_files = [DataFile(file.name, file.length) for file in files]
    writer = IndexWriter(plan, data_files, has_codecs(plan, finished))
    for number, file in enumerate(plan.files):
        for blob in written_blobs(plan, file, finished[file.name]):
            writer.put_blob(blob.key, blob.offset, blob.length, number)
            for part_number, part in enumerate(blob.parts):
                coded = part.stored_digest if part.is_coded else None
                place = (part.offset, part.stored_length, part.digest, coded)
                writer.put_part(blob.key, part_number, number, *place)
    if plan.dense_file is not None:
        number, digests = len(plan.files), iter(finished[DENSE_NAME].digests)
        ranges = [(number, offset, next(digests)) for offset in plan.dense_file.range_offsets]
        tensors = [(number, offset, next(digests)) for offset in plan.dense_file.tensor_offsets]
        writer.put_dense(ranges, tensors)
    return writer.finish()


def _with_digests(file: NewFile, digests: Sequence[int]) -> Iterator[Extent]:
    for extent, digest in zip(file.extents(), digests, strict=True):
        yield extent._replace(digest=digest)


def _stored_extents(plan: Plan, file: PlannedFile, finished: FinishedFile) -> Iterator[Extent]:
    for blob in written_blobs(plan, file, finished):
        for part in blob.parts:
            yield Extent(part.offset, part.stored_length, 0, 0, part.stored_digest)


def makes_sense(file: NewFile, finished: FinishedFile, is_stored: bool) -> bool:
    """Return whether a journal's entry of a finished file is of just these extents.

    With `is_stored` it has to state how the parts are stored.
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
