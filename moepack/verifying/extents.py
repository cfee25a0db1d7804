"""What the index says of the bytes of a pack's files: extents, in items that are taken as a whole.

An item is a blob, a dense tensor, or bytes of a shard. It is what a sample is drawn from.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

RUN_LENGTH = 8 << 20


class SourceRange(NamedTuple):
    """Where bytes lie in the source: the number of the shard, the offset from its start."""

    shard: int
    offset: int


class Frame(NamedTuple):
    """What lies in an extent if that is a frame: the bytes of its content, the frame's digest."""

    content_length: int
    digest: int | None


class Extent(NamedTuple):
    """A part, a dense tensor or bytes of a shard, as the index places it.

    `offset` counts from the start of the file, `length` is the bytes that it takes there. `digest`
    is None where it is not known, `source` where these bytes are not to be compared; `sha256` is
    what the manifest says of a shard's header, in hexadecimal digits, and `strong` what the index
    says: all of these are of the content if there is a `frame`. Tensors have no layer, expert and
    part; bytes of a shard have no name at all.
    """

    offset: int
    length: int
    digest: int | None
    layer: int | None = None
    expert: int | None = None
    part: str | None = None
    tensor: str | None = None
    source: SourceRange | None = None
    sha256: str | None = None
    strong: bytes | None = None
    frame: Frame | None = None

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.length


class Item(NamedTuple):
    """What is looked at as a whole: from `start` to `end` in its file, padding included.

    `number` is that of a blob, or the count of blobs and that of a tensor; None for bytes of a
    shard. `extents` have rising offsets.
    """

    start: int
    end: int
    number: int | None
    extents: tuple[Extent, ...]


class Run(NamedTuple):
    """What a thread takes: a range of file number `file`; outside its extents are zeros."""

    file: int
    start: int
    end: int
    extents: tuple[Extent, ...]


def cut(items: Sequence[Item], length: int) -> tuple[list[Item], int]:
    """Return what there is of `items` in a file of `length` bytes, and up to where it is known.

    Of an extent that is cut nothing is left; of an item all extents before are.
    """
    cut_offsets = (
        extent.offset for item in items for extent in item.extents if extent.end > length
    )
    known = min(cut_offsets, default=length)
    left = [
        item._replace(
            end=min(item.end, known),
            extents=tuple(extent for extent in item.extents if extent.end <= known),
        )
        for item in items
        if item.start < known
    ]
    return left, known


def whole_runs(file: int, items: Iterable[Item], length: int) -> Iterator[Run]:
    """Cut the `length` bytes of a file into runs; an item is never cut. `items` are by `start`."""
    start = reached = 0
    pending: list[Item] = []
    for item in items:
        if pending and item.start >= reached and item.end - start > RUN_LENGTH:
            yield _run(file, start, item.start, pending)
            start, pending = item.start, []
        pending.append(item)
        reached = max(reached, item.end)
    yield _run(file, start, length, pending)


def item_runs(file: int, items: Iterable[Item]) -> Iterator[Run]:
    """Return a run for each item."""
    for item in items:
        yield Run(file, item.start, item.end, item.extents)


def _run(file: int, start: int, end: int, items: Sequence[Item]) -> Run:
    # In order, also where the index has them inside of each other.
    extents = sorted((extent for item in items for extent in item.extents), key=itemgetter(0))
    return Run(file, start, end, tuple(extents))
