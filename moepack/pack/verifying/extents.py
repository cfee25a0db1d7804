"""The ranges of a pack's files to be checked, by the index, and the items that they belong to.

An item is a blob, a dense tensor, or bytes of a shard. Samples are drawn from items.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from moepack.common.errors import PackError

RUN_LENGTH = 8 << 20

Record = TypeVar("Record")

Where = dict[str, Any]
"""The fields of a finding that name the owner of a range."""


class CheckedRange(NamedTuple):
    """A part, a dense tensor or bytes of a shard, as the index places it.

    `offset` counts from the start of the file, `length` is the bytes that it takes there. `digest`
    is None if it is unknown. `source` is the number of the shard and the offset there of the bytes
    to compare it with, None for none. `sha256` is that of a shard's header by the manifest, in
    hexadecimal digits, `strong` the one in the index.
    """

    offset: int
    length: int
    digest: int | None
    where: Where
    source: tuple[int, int] | None = None
    sha256: str | None = None
    strong: bytes | None = None

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.length


class Item(NamedTuple):
    """A blob, a tensor or bytes of a shard: from `start` to `end` in its file, padding included.

    `number` is that of a blob, or the count of blobs and that of a tensor; None for bytes of a
    shard. `ranges` have rising offsets.
    """

    start: int
    end: int
    number: int | None
    ranges: tuple[CheckedRange, ...]


class Segment(NamedTuple):
    """A unit of work: a range of file number `file`, which is zero outside its `ranges`."""

    file: int
    start: int
    end: int
    ranges: tuple[CheckedRange, ...]


class Place(NamedTuple):
    """A range of bytes, which overlaps no other in a sound pack; messages call it `noun`."""

    start: int
    end: int
    noun: str
    where: Where


def readable(look_up: Callable[[int], Record], count: int) -> Iterator[tuple[int, Record]]:
    """Yield the records that can be read, with their numbers; the inventory reports the others."""
    for number in range(count):
        try:
            yield number, look_up(number)
        except PackError:
            continue


def cut(items: Sequence[Item], length: int) -> tuple[list[Item], int]:
    """Return the parts of `items` in a file of `length` bytes, and the end of the last whole range.

    A range that is cut is dropped with all behind it; an item keeps the ranges before.
    """
    ranges = (one for item in items for one in item.ranges)
    end = min((one.offset for one in ranges if one.end > length), default=length)
    kept = [
        item._replace(
            end=min(item.end, end), ranges=tuple(one for one in item.ranges if one.end <= end)
        )
        for item in items
        if item.start < end
    ]
    return kept, end


def whole_segments(file: int, items: Iterable[Item], length: int) -> Iterator[Segment]:
    """Cut the `length` bytes of a file between items, which are ordered by their starts."""
    start = reached = 0
    pending: list[Item] = []
    for item in items:
        if pending and item.start >= reached and item.end - start > RUN_LENGTH:
            yield _segment(file, start, item.start, pending)
            start, pending = item.start, []
        pending.append(item)
        reached = max(reached, item.end)
    yield _segment(file, start, length, pending)


def _segment(file: int, start: int, end: int, items: Sequence[Item]) -> Segment:
    # A faulty index may place items inside each other.
    ranges = sorted((one for item in items for one in item.ranges), key=itemgetter(0))
    return Segment(file, start, end, tuple(ranges))


def overlaps(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """Yield each range that overlaps an earlier one, with that one.

    Of two that start at the same byte, the longer one comes before.
    """
    reached: Place | None = None
    for place in sorted(places, key=lambda place: (place.start, -place.end)):
        if place.start == place.end:
            continue
        if reached is not None and place.start < reached.end:
            yield place, reached
        if reached is None or place.end > reached.end:
            reached = place
