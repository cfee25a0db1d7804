"""Data files that are written, and the index of these."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moepack.pack.format.index_encoder import IndexWriter
from moepack.pack.format.tables import DataFile
from moepack.packing.plan.plan import DENSE_NAME, Plan
from moepack.storage.extents import Extent, FinishedFile, NewFile


def to_json(file: FinishedFile) -> dict[str, str]:
    """Return a finished file as journals and records state it."""
    return {"name": file.name, "digests": file.digests.tobytes().hex()}


def from_json(entry: Mapping[str, Any]) -> FinishedFile:
    """Read a finished file; raise KeyError, TypeError or ValueError if it makes no sense."""
    return FinishedFile(str(entry["name"]), array("Q", bytes.fromhex(entry["digests"])))


def on_disk(file: NewFile, finished: FinishedFile) -> NewFile | None:
    """Return a planned file with the digests of its extents; None if these are of another."""
    if len(finished.digests) != sum(1 for _ in file.extents()):
        return None
    return file._replace(extents=partial(_with_digests, file, finished.digests))


def _with_digests(file: NewFile, digests: Sequence[int]) -> Iterator[Extent]:
    for extent, digest in zip(file.extents(), digests, strict=True):
        yield extent._replace(digest=digest)


def encode_index(plan: Plan, finished: Mapping[str, FinishedFile]) -> bytes:
    """Return the bytes of the index of a pack with the files `finished`."""
    writer = IndexWriter(plan, [DataFile(file.name, file.length) for file in plan.new_files()])
    for number, file in enumerate(plan.files):
        start, digests = 0, iter(finished[file.name].digests)
        for key in file.blobs:
            template = plan.templates[key.template]
            writer.put_blob(key, start, template.length, number)
            for part_number, offset in enumerate(template.offsets_in_blob):
                writer.put_part(key, part_number, number, start + offset, next(digests))
            start += template.length
    if plan.dense_file is not None:
        number, digests = len(plan.files), iter(finished[DENSE_NAME].digests)
        ranges = [(number, offset, next(digests)) for offset in plan.dense_file.range_offsets]
        tensors = [(number, offset, next(digests)) for offset in plan.dense_file.tensor_offsets]
        writer.put_dense(ranges, tensors)
    return writer.finish()
