"""The items of a pack: blobs, dense tensors and the other bytes of shards, where they lie in it.

Pure: no file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from moepack.common.errors import PackError
from moepack.pack.format.index import Index
from moepack.pack.format.tables import PackedFamily
from moepack.pack.reading.shard_map import part_extent, tensor_extent
from moepack.storage.extents import Extent

ItemKey = tuple[int, int, str]
"""Layer, expert and family of a blob."""


class PackedItem(NamedTuple):
    """A range of file number `file` from `start` to `end`, with all that is not zero in `extents`.

    `key` is that of a blob, None for the dense part.
    """

    file: int
    start: int
    end: int
    extents: tuple[Extent, ...]
    key: ItemKey | None = None

    @property
    def length(self) -> int:
        """The bytes of the range, padding included."""
        return self.end - self.start


def packed_items(index: Index) -> list[PackedItem]:
    """List all items of a pack in the order of its files; none is empty.

    Raises PackError for records that break the format, for an index over shards, and for files
    without digests.
    """
    for file in index.files:
        if file.is_shard or not file.has_digests:
            problem = "an index over shards" if file.is_shard else "has no digests"
            raise PackError(problem, path=index.path, place=file.name, expected="a pack")
    items = [*_blobs(index), *_dense(index)]
    items.sort(key=attrgetter("file", "start"))
    for before, item in pairwise(items):
        if item.file == before.file and item.start < before.end:
            raise PackError(
                "two items overlap",
                path=index.path,
                place=item.extents[0].label,
                expected=f"byte {before.end:,} of {index.files[item.file].name} or later",
                found=f"byte {item.start:,}",
            )
    return items


def _blobs(index: Index) -> Iterator[PackedItem]:
    for family in index.families:
        for expert in range(family.expert_count):
            start, length, _, _, file = index.blob(family.first_blob + expert)
            parts = list(_parts(index, family, expert))
            parts.sort(key=attrgetter("offset"))
            yield PackedItem(
                file,
                start,
                start + length,
                _inside(index, file, start, start + length, parts),
                (family.layer, expert, family.name),
            )


def _parts(index: Index, family: PackedFamily, expert: int) -> Iterator[Extent]:
    """Yield the parts of an expert, at their own offsets."""
    for number in range(len(family.part_kinds)):
        part = part_extent(index, family, expert, number, 0)
        yield part._replace(offset=part.input_offset)


def _inside(
    index: Index, file: int, start: int, end: int, parts: Sequence[Extent]
) -> tuple[Extent, ...]:
    """Return the parts of a blob; raise PackError if they are not one after the other in it."""
    position = start
    for part in parts:
        if part.input != file or not position <= part.offset <= part.end <= end:
            raise PackError(
                "a part lies outside its blob, or on another",
                path=index.path,
                place=part.label,
                expected=f"bytes {position:,} to {end:,} of {index.files[file].name}",
                found=f"bytes {part.offset:,} to {part.end:,}",
            )
        position = part.end
    return tuple(parts)


def _dense(index: Index) -> Iterator[PackedItem]:
    extents = [tensor_extent(index, tensor, tensor.offset) for tensor in index.tensors()]
    for other in index.shard_bytes():
        label = f"bytes of a shard from byte {other.shard_offset:,} on"
        extents.append(
            Extent(other.offset, other.length, other.file, other.offset, other.digest, label)
        )
    for extent in extents:
        if extent.length:
            yield PackedItem(extent.input, extent.offset, extent.end, (extent,))
