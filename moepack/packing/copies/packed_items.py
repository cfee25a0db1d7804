"""The items of a pack: experts, dense tensors and the other bytes of shards, where they lie in it.

Pure: no file is opened.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from moepack.common.errors import PackError
from moepack.pack.format.index import Index
from moepack.pack.reading.copies import CopyRequest
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import part_extent, tensor_extent
from moepack.storage.extents import Extent, Ranges, merged

RUN_LENGTH = 32 << 20
"""About how many bytes are asked for at a time: the hub limits the count of requests."""
_MAX_GAP = 64 << 10
"""Bytes between two items that are asked for and dropped."""

ItemKey = tuple[int, int, str]
"""Layer, expert and family of a blob."""


class PackedItem(NamedTuple):
    """A range of file number `file` from `start` to `end`, with all that is not zero in `extents`.

    `key` is that of a blob, or of a part in a shard; None for the dense part.
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
    """List the items of a pack in the order of its files. Raises PackError for broken records."""
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
            key = (family.layer, expert, family.name)
            parts = []
            for number in range(len(family.part_kinds)):
                part = part_extent(index, family, expert, number, 0)
                parts.append(part._replace(offset=part.input_offset))
            if not length:  # an index over shards, in which they lie apart
                for part in parts:
                    yield PackedItem(part.input, part.offset, part.end, (part,), key)
                continue
            parts.sort(key=attrgetter("offset"))
            _check_inside(index, file, start, start + length, parts)
            yield PackedItem(file, start, start + length, tuple(parts), key)


def _check_inside(index: Index, file: int, start: int, end: int, parts: Sequence[Extent]) -> None:
    """Raise PackError if the parts of a blob are not one after the other in it."""
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


def choose(pack: Pack, items: Sequence[PackedItem], request: CopyRequest) -> set[int]:
    """Return the numbers of the items of the requested experts."""
    keys = pack.hottest(request.hottest) if request.hottest else ()
    hottest = {(*key, pack.families(key.layer)[0]) for key in keys}
    return {
        number
        for number, item in enumerate(items)
        if item.key is not None
        and (request.is_all or item.key[0] in request.layers or item.key in hottest)
    }


def ranges_of(
    index: Index, items: Sequence[PackedItem], numbers: Container[int]
) -> Mapping[str, Ranges]:
    """Return the ranges of some of all items by the names of their files.

    Those of neighbours are one: between them there are only zeros, as in a hole.
    """
    ranges: dict[str, list[tuple[int, int]]] = {}
    before = None
    for number, item in enumerate(items):
        if number not in numbers:
            before = None
            continue
        start = item.start if before is None or before.file != item.file else before.end
        ranges.setdefault(index.files[item.file].name, []).append((start, item.end))
        before = item
    return {name: merged(pairs) for name, pairs in ranges.items()}


def runs_of(items: Sequence[PackedItem], numbers: Iterable[int]) -> Iterator[list[int]]:
    """Gather items of one file that are asked for at once, by their numbers.

    Those of the dense part come first, since one may be long.
    """
    run: list[int] = []
    for number in sorted(numbers, key=lambda number: (items[number].key is not None, number)):
        if run and not _is_next(items[run[0]], items[run[-1]], items[number]):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _is_next(first: PackedItem, last: PackedItem, item: PackedItem) -> bool:
    is_near = last.file == item.file and 0 <= item.start - last.end <= _MAX_GAP
    return is_near and item.end - first.start <= RUN_LENGTH
