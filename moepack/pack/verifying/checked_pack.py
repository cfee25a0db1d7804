"""A pack in verification, and the ranges of its files that are checked."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moepack.common.errors import PackError
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.reading.copies import Partial
from moepack.pack.verifying.report import Findings

RUN_LENGTH = 8 << 20

Record = TypeVar("Record")

Where = dict[str, Any]
"""The fields of a finding that name the owner of a range."""


@dataclass
class CheckedPack:
    """A pack whose manifest and index can be decoded.

    `chosen` are the numbers of the blobs and tensors whose bytes are checked (see `Segment`), None
    for all; `not_looked_at` says in words which bytes are not. `tensors` and `shard_ranges` are the
    records of dense tensors and other bytes of shards that can be decoded, by their numbers.
    """

    path: Path
    manifest: Manifest
    partial: Partial | None
    index: Index
    findings: Findings
    chosen: frozenset[int] | None = None
    not_looked_at: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = [self.path / file.name for file in self.index.files]
        self.index_file = {"file": os.path.basename(self.index.path)}
        self.tensors = dict(self._decode(self.index.tensor, self.index.tensor_count))
        shard_range, count = self.index.shard_range, self.index.shard_range_count
        self.shard_ranges = dict(self._decode(shard_range, count))

    def _decode(self, look_up: Callable[[int], Record], count: int) -> Iterator[tuple[int, Record]]:
        for number in range(count):
            try:
                yield number, look_up(number)
            except PackError as error:
                self.findings.add_error("record", error, **self.index_file)


class CheckedRange(NamedTuple):
    """A part, a dense tensor or other bytes of a shard, as the index places it in a file.

    `noun` and `where` name it in findings. `shard` is the number of the shard that it came from,
    None if that cannot be read; `source` are the number of the shard and the offset there of the
    bytes to compare it with. `sha256` is that of a shard's header by the manifest, in hexadecimal
    digits, `strong` the one in the index. A digest that is unknown is None.
    """

    file: int
    offset: int
    length: int
    noun: str
    where: Where
    digest: int | None
    strong: bytes | None
    shard: int | None
    shard_offset: int
    source: tuple[int, int] | None
    sha256: str | None = None

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.length


class Segment(NamedTuple):
    """A range of a file, which is zero outside its `ranges`; these have rising offsets.

    `number` is that of a blob, or the count of blobs and that of a tensor; None for all else.
    """

    file: int
    start: int
    end: int
    ranges: tuple[CheckedRange, ...]
    number: int | None = None

    @property
    def has_proof(self) -> bool:
        """Whether there is anything to compare its bytes with."""
        proofs = ((one.digest, one.source, one.strong) for one in self.ranges)
        return any(proof is not None for several in proofs for proof in several)


class Gap(NamedTuple):
    """A range of a shard that the pack does not hold, so it must be zeros."""

    shard: int
    start: int
    end: int


def cut(segments: Sequence[Segment], length: int) -> tuple[list[Segment], int]:
    """Return the parts of segments in a file of `length` bytes, and the end of the whole ranges.

    A range that is cut is dropped with all behind it; a segment keeps the ranges before.
    """
    ranges = (one for segment in segments for one in segment.ranges)
    end = min([length, *(one.offset for one in ranges if one.end > length)])
    kept = [
        segment._replace(
            end=min(segment.end, end), ranges=tuple(one for one in segment.ranges if one.end <= end)
        )
        for segment in segments
        if segment.start < end
    ]
    return kept, end


def join(file: int, segments: Iterable[Segment], start: int, end: int) -> Iterator[Segment]:
    """Join segments, which are ordered by their starts, to long ones from `start` to `end`."""
    reached = start
    pending: list[Segment] = []
    for segment in segments:
        if pending and segment.start >= reached and segment.end - start > RUN_LENGTH:
            yield _joined(file, start, segment.start, pending)
            start, pending = segment.start, []
        pending.append(segment)
        reached = max(reached, segment.end)
    yield _joined(file, start, end, pending)


def _joined(file: int, start: int, end: int, segments: Sequence[Segment]) -> Segment:
    # A faulty index may place segments inside each other.
    ranges = sorted((one for segment in segments for one in segment.ranges), key=itemgetter(1))
    return Segment(file, start, end, tuple(ranges))


def overlaps(
    ranges: Iterable[CheckedRange], start: Callable[[CheckedRange], int]
) -> Iterator[tuple[CheckedRange, CheckedRange]]:
    """Yield each range that overlaps an earlier one, with that one, by their `start`.

    Of two that start at the same byte, the longer one comes before.
    """
    reached: CheckedRange | None = None
    end = 0
    for one in sorted(ranges, key=lambda one: (start(one), -one.length)):
        if not one.length:
            continue
        if reached is not None and start(one) < end:
            yield one, reached
        if reached is None or start(one) + one.length > end:
            reached, end = one, start(one) + one.length
