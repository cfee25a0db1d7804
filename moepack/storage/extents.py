"""New files as a list of copied ranges: the one shape of all files that moepack writes.

A pack's data files, restored shards and exported models are all this: ranges of input files at
planned offsets, and zeros between them. What an interrupted run has left of such a file is found by
the digests of its extents.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moepack.common import digest
from moepack.storage.regular_file import open_regular

RUN_LENGTH = 8 << 20
"""About how many bytes of a new file are written in one go."""
BLOCK = 4096
"""Of the file systems that share blocks between files."""
_PIECE_LENGTH = 512 << 10

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of a file, ascending and apart."""


class Extent(NamedTuple):
    """`length` bytes at `input_offset` of an input, and their `offset` in the new file.

    `input` is the number of the input file, `digest` that of the bytes, if it is known, `label`
    their name in messages.
    """

    offset: int
    length: int
    input: int
    input_offset: int
    digest: int | None = None
    label: str = ""

    @property
    def end(self) -> int:
        """The end of the extent in the new file."""
        return self.offset + self.length

    @property
    def is_blocks(self) -> bool:
        """Whether it is the same whole blocks in both files, which can be shared."""
        is_aligned = (self.offset | self.length | self.input_offset) % BLOCK == 0
        return self.length > 0 and is_aligned

    def is_before(self, other: Extent) -> bool:
        """Return whether `other` follows at once, in both files."""
        is_next = self.input == other.input and self.end == other.offset
        return is_next and self.input_offset + self.length == other.input_offset


class NewFile(NamedTuple):
    """A file to write: its plain name, its length in bytes, and the extents copied into it.

    `extents` yields them anew with each call, by rising offsets; zeros fill the gaps.
    """

    name: str
    length: int
    extents: Callable[[], Iterable[Extent]]


class FinishedFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets."""

    name: str
    digests: array[int]


class Run(NamedTuple):
    """A piece of a new file that is written in one go: from `start` to `end`, zeros included.

    `first` is the number of its first extent within the file.
    """

    start: int
    end: int
    first: int
    extents: tuple[Extent, ...]


def runs(file: NewFile, length: int = RUN_LENGTH) -> Iterator[Run]:
    """Cut a file into runs of about `length` bytes; an extent is never cut."""
    start = number = 0
    pending: list[Extent] = []
    for extent in file.extents():
        if pending and extent.end - start > length:
            yield Run(start, extent.offset, number, tuple(pending))
            number += len(pending)
            start, pending = extent.offset, []
        pending.append(extent)
    yield Run(start, file.length, number, tuple(pending))


def digests_of(
    path: Path,
    extents: Iterable[Extent],
    advanced: Callable[[int], None] | None = None,
    *,
    follows_link: bool = False,
) -> array[int]:
    """Compute the digests of a file's extents, from its bytes, in the order given.

    `advanced` is called with the bytes read since its last call. Raises OSError, also for a link
    unless it `follows_link`.
    """
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    descriptor = open_regular(path, os.O_RDONLY | (0 if follows_link else os.O_NOFOLLOW))
    with open(descriptor, "rb", buffering=0):
        return array("Q", (_digest(descriptor, extent, buffer, advanced) for extent in extents))


def is_whole(path: Path, file: NewFile, advanced: Callable[[int], None]) -> bool:
    """Return whether `file` is at `path` to the byte, as far as its digests are known.

    `advanced` is called with the bytes found correct since its last call. Raises OSError.
    """
    if path.is_symlink() or not path.is_file():
        return False
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    with open(path, "rb", buffering=0, opener=open_regular) as opened:
        if os.fstat(opened.fileno()).st_size != file.length:
            return False
        for run in runs(file):
            if not is_written(opened.fileno(), run, buffer):
                return False
            advanced(run.end - run.start)
    return True


def is_written(descriptor: int, run: Run, buffer: memoryview) -> bool:
    """Return whether an open file has a run already: digests known and equal, zeros between."""
    position = run.start
    for extent in run.extents:
        if extent.digest is None or not is_zero(descriptor, position, extent.offset, buffer):
            return False
        if _digest(descriptor, extent, buffer) != extent.digest:
            return False
        position = extent.end
    return is_zero(descriptor, position, run.end, buffer)


def _digest(
    descriptor: int,
    extent: Extent,
    buffer: memoryview,
    advanced: Callable[[int], None] | None = None,
) -> int:
    computed = digest.stream()
    for piece in _pieces(descriptor, extent.offset, extent.end, buffer):
        computed.update(piece)
        if advanced is not None:
            advanced(len(piece))
    return computed.intdigest()


def is_zero(descriptor: int, start: int, end: int, buffer: memoryview) -> bool:
    """Return whether all of a range of an open file is there, and zeros. Raises OSError."""
    length = 0
    for piece in _pieces(descriptor, start, end, buffer):
        length += len(piece)
        if bytes(piece).count(0) != len(piece):
            return False
    return length == end - start


def _pieces(descriptor: int, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a range of a file, as far as the file reaches."""
    while start < end:
        length = os.preadv(descriptor, [buffer[: end - start]], start)
        if not length:
            return
        yield buffer[:length]
        start += length


class RangeSet:
    """The ranges of one file, to be asked what they cover."""

    def __init__(self, ranges: Ranges) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def covers(self, start: int, end: int) -> bool:
        """Return whether all bytes from `start` to `end` are in one of the ranges."""
        number = bisect_right(self._starts, start) - 1
        return number >= 0 and end <= self._ends[number]


def read_ranges(pairs: Iterable[Any]) -> Ranges:
    """Return ranges as JSON has them; raise ValueError or TypeError for anything else."""
    ranges = tuple((start, end) for start, end in pairs)
    edges = [edge for pair in ranges for edge in pair]
    is_ascending = all(first < second for first, second in pairwise([-1, *edges]))
    if not (is_ascending and {int}.issuperset(map(type, edges))):
        raise ValueError("no such ranges")
    return ranges


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ascending ranges as one where they touch."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
