"""Where things lie: blobs, their parts, dense tensors, and parts in memory."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from moepack.errors import RequestError


class BlobLocation(NamedTuple):
    """Where one expert's blob lies.

    `offset` counts from the start of the file at `path`, `length` is bytes with padding. `rank` 0
    is the hottest blob of the pack. `hotness` is how often the expert was chosen, None where that
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
    """How hot an expert is, whether it has a blob or its parts lie apart, as in an index of shards.

    `rank` and `hotness` are as in BlobLocation. `length` is the bytes of its blob, or of its parts
    if these are more: where they lie apart, or are stored by a codec.
    """

    rank: int
    hotness: int | None
    length: int


class PartLocation(NamedTuple):
    """Where one part lies.

    `offset` counts from the start of the file at `path`. `blob_offset` is that of its blob; it is
    None where there is none, as in an index over shards, and where a part of the blob is stored by
    a codec, since such a blob is not read as it lies. `length` is the part's bytes, without
    padding; `stored_length` is what it takes on disk, less than that where `codec` names the codec
    that it is stored by. `digest` is the XXH3-64 of the part's bytes, None where it is not known.
    """

    layer: int
    expert: int
    part: str
    path: Path
    offset: int
    blob_offset: int | None
    stored_length: int
    length: int
    digest: int | None
    codec: str | None

    @property
    def offset_in_blob(self) -> int:
        """The offset from the start of the blob, as it is read; raises RequestError for none."""
        if self.blob_offset is None:
            place = f"layer {self.layer} expert {self.expert} {self.part}"
            problem = "this part lies in no blob that is read as it lies"
            hint = "read the part, or take it with `part` from what was read of the expert"
            raise RequestError(problem, path=self.path, place=place, hint=hint)
        return self.offset - self.blob_offset


class TensorLocation(NamedTuple):
    """A dense tensor: what it is, and where it lies.

    `shape` is in GGUF order (contiguous axis first), `length` is bytes, without padding. `offset`
    counts from the start of the file at `path`; it is a multiple of the pack's tensor alignment,
    4 KiB or more, but in an index over shards. `digest` is None where it is not known.
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
    """A part within an expert's bytes in memory; the digest is None where it is not known."""

    name: str
    start: int
    length: int
    digest: int | None


# By its tuple, in half the time: every part of every expert that is read comes by here.
new_span = partial(tuple.__new__, PartSpan)
