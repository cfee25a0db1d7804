"""Locations of blobs, parts and dense tensors in files, and of parts in memory."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import RequestError


class BlobLocation(NamedTuple):
    """The location of one expert's blob.

    `offset` counts from the start of the file at `path`, `length` is bytes with padding. `rank` 0
    is the hottest blob of the pack. `hotness` is how often the expert was routed to, None if that
    was not measured.
    """

    layer: int
    expert: int
    family: str
    path: Path
    offset: int
    length: int
    rank: int
    hotness: int | None


class ExpertHotness(NamedTuple):
    """The hotness of an expert, with a blob or with parts that lie apart, as in an index of shards.

    `rank` and `hotness` are as in BlobLocation. `length` is the bytes of its blob, or of its parts
    if these lie apart.
    """

    rank: int
    hotness: int | None
    length: int


class PartLocation(NamedTuple):
    """The location of one part.

    `offset` counts from the start of the file at `path`. `blob_offset` is that of its blob, None if
    there is none, as in an index over shards. `length` is the part's bytes, without padding;
    `digest` is their XXH3-64, None if it is not known.
    """

    layer: int
    expert: int
    part: str
    path: Path
    offset: int
    blob_offset: int | None
    length: int
    digest: int | None

    @property
    def offset_in_blob(self) -> int:
        """The offset from the start of the blob, in bytes; raises RequestError without one."""
        if self.blob_offset is None:
            place = f"layer {self.layer} expert {self.expert} {self.part}"
            problem = "this part lies in no blob"
            hint = "read the part, or take it with `part` from what was read of the expert"
            raise RequestError(problem, path=self.path, place=place, hint=hint)
        return self.offset - self.blob_offset


class TensorLocation(NamedTuple):
    """A dense tensor: its type and shape, and its location.

    `shape` is in GGUF order (contiguous axis first), `length` is bytes, without padding. `offset`
    counts from the start of the file at `path`; it is a multiple of the pack's tensor alignment,
    4 KiB or more, except in an index over shards. `digest` is None if it is not known.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    digest: int | None


class PartSpan(NamedTuple):
    """A part within an expert's bytes in memory; the digest is None if it is not known."""

    name: str
    start: int
    length: int
    digest: int | None


# By its tuple, in half the time: every part of every expert that is read comes by here.
new_span = partial(tuple.__new__, PartSpan)
