"""Units: the segments that are moved between shards and pack, if there is room for one copy only.

Pure: no file is opened. A unit is a segment of a data file with the pieces of shards that belong
there. Units go from the first file's start to the last one's end. Packing takes them by rising
numbers and restoring by falling ones, so that at any moment those before some number are in the
pack, and the others in the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moepack.common.sizes import align
from moepack.pack.format.index import Index
from moepack.pack.reading.shard_map import ShardMap

MAX_LENGTH = 256 << 20
"""Of a unit; one layer if that is less. A run loses no more than this when it is interrupted."""
CUT_ALIGNMENT = 64 << 10
"""Alignment of the cuts in a piece that is larger than a unit."""

PieceKey = tuple[int, int]
"""A piece by its position in the pack: the number of the data file, and the offset in it."""


class Piece(NamedTuple):
    """The same bytes twice: in file number `file` of the pack, and in a shard.

    Offsets count from the start of the file and of the shard, and `length` is in bytes. `digest` is
    None if it is not known.
    """

    length: int
    file: int
    offset: int
    shard: int
    shard_offset: int
    digest: int | None
    label: str

    @property
    def end(self) -> int:
        """The end in the data file."""
        return self.offset + self.length

    @property
    def key(self) -> PieceKey:
        """The key of the piece."""
        return self.file, self.offset

    def cut(self, length: int) -> Iterator[Piece]:
        """Yield it in pieces of up to `length` bytes, which are without digests if it is longer."""
        if self.length <= length:
            yield self
            return
        for start in range(0, self.length, length):
            yield self._replace(
                length=min(length, self.length - start),
                offset=self.offset + start,
                shard_offset=self.shard_offset + start,
                digest=None,
            )


class Unit(NamedTuple):
    """From `start` to `end` of file number `file` of the pack; zeros between its pieces."""

    number: int
    file: int
    start: int
    end: int
    pieces: tuple[Piece, ...]


def unit_length(index: Index) -> int:
    """Return the length of a unit: that of all blobs of the largest layer, at most MAX_LENGTH."""
    layers: dict[int, int] = {}
    for family in index.families:
        length = family.expert_count * index.blob(family.first_blob)[1]
        layers[family.layer] = layers.get(family.layer, 0) + length
    largest = align(max(layers.values()), CUT_ALIGNMENT)
    return min(largest, MAX_LENGTH)


class FreeableBlocks:
    """The blocks of the shards that may be punched, since all their bytes are in the pack.

    A block is `block` bytes, and neighbours share those at their borders: only when both are in the
    pack may it go. Zeros between pieces are nobody's. `freed_length` is how many bytes the file
    system has back for sure: if it keeps extents of up to `extent` bytes as long as any byte of
    them is in use, that is less than the punched bytes.
    """

    def __init__(self, shards: Sequence[ShardMap], block: int, extent: int = 0) -> None:
        self.freed_length = 0
        self._block = block
        self._extent = extent
        self._lengths = [shard.length for shard in shards]
        # By shard, the end of each range that may go by its start, and the start by its end.
        self._end_of: list[dict[int, int]] = [{} for _ in shards]
        self._start_of: list[dict[int, int]] = [{} for _ in shards]
        for number, shard in enumerate(shards):
            position = 0
            for piece in shard.pieces:
                self._join(number, position, piece.offset)
                position = piece.end
            self._join(number, position, shard.length)

    def add(self, piece: Piece) -> tuple[int, int] | None:
        """Note that a piece is in the pack; return start and end of the blocks that may go now.

        A shard's header stays to the end: it is the only description of the file.
        """
        if piece.shard_offset == 0:
            return None
        shard, start, block = piece.shard, piece.shard_offset, self._block
        end = start + piece.length
        joined_start, joined_end = self._join(shard, start, end)
        if joined_end == self._lengths[shard]:  # nothing of another file is in the last block
            joined_end = align(joined_end, block)
        if self._extent:
            self.freed_length += self._sure(shard, joined_start, joined_end)
            self.freed_length -= self._sure(shard, joined_start, start)
            self.freed_length -= self._sure(shard, end, joined_end)
        first = max(align(joined_start, block), start - start % block)
        last = min(joined_end - joined_end % block, align(end, block))
        if first >= last:
            return None
        if not self._extent:
            self.freed_length += last - first
        return first, last

    def _sure(self, shard: int, start: int, end: int) -> int:
        """Return the least free length of a range: an extent may reach over each of its ends."""
        kept = self._extent * ((start > 0) + (end < self._lengths[shard]))
        return max(0, end - start - kept)

    def _join(self, shard: int, start: int, end: int) -> tuple[int, int]:
        """Add a range to its neighbours, and return the joined range."""
        if start >= end:
            return start, end
        ends, starts = self._end_of[shard], self._start_of[shard]
        joined_start = starts.pop(start, start)
        joined_end = ends.pop(end, end)
        ends[joined_start] = joined_end
        starts[joined_end] = joined_start
        return joined_start, joined_end


class SpaceNeeds(NamedTuple):
    """Bytes that pack and shards together take beyond the shards, as the units go over.

    `before[n]` is with the units before n in the pack and nowhere else, `during[n]` while unit n is
    in both. `before` has one more, for when all are in the pack.
    """

    before: tuple[int, ...]
    during: tuple[int, ...]

    def to_pack(self, first: int) -> int:
        """Return the bytes that packing takes from unit `first` on."""
        return max((*self.during[first:], self.before[-1])) - self.before[first]

    def to_restore(self, count: int) -> int:
        """Return the bytes that restoring the first `count` units takes."""
        return max((*self.during[:count], 0)) - self.before[count]


class Units:
    """The units of a model: its pieces, and the data files cut into segments of `length` bytes.

    `length` is a multiple of CUT_ALIGNMENT. `pieces` are uncut, in the order of the pack; none is
    empty. Those of `units` are cut if they are longer than a unit, and are also in `cut_pieces`.
    """

    def __init__(self, maps: Sequence[ShardMap], file_lengths: Sequence[int], length: int) -> None:
        self._maps = maps
        self.length = length
        self.shard_names = [shard.name for shard in maps]
        pieces = [
            Piece(p.length, p.input, p.input_offset, shard, p.offset, p.digest, p.label)
            for shard, mapped in enumerate(maps)
            for p in mapped.pieces
        ]
        self.pieces = sorted(pieces, key=lambda piece: piece.key)
        self.units = self._cut(file_lengths)
        self.cut_pieces = [piece for unit in self.units for piece in unit.pieces]

    def _cut(self, file_lengths: Sequence[int]) -> list[Unit]:
        units: list[Unit] = []
        by_file: list[list[Piece]] = [[] for _ in file_lengths]
        for piece in self.pieces:
            by_file[piece.file].extend(piece.cut(self.length))
        for file, file_length in enumerate(file_lengths):
            start, pieces = 0, list[Piece]()
            for piece in by_file[file]:
                if pieces and piece.end - start > self.length:
                    units.append(Unit(len(units), file, start, piece.offset, tuple(pieces)))
                    start, pieces = piece.offset, []
                pieces.append(piece)
            if file_length > start:
                units.append(Unit(len(units), file, start, file_length, tuple(pieces)))
        return units

    def space_needs(self, block: int, extent: int = 0) -> SpaceNeeds:
        """Compute the space that they take; `block` and `extent` as for FreeableBlocks."""
        blocks = FreeableBlocks(self._maps, block, extent)
        written = 0
        before, during = [0], []
        for unit in self.units:
            written += unit.end - unit.start
            during.append(written - blocks.freed_length)
            for piece in unit.pieces:
                blocks.add(piece)
            before.append(written - blocks.freed_length)
        return SpaceNeeds(tuple(before), tuple(during))

    def absent_length(self, block: int) -> int:
        """Return how much longer missing shards are than the bytes that packing would free."""
        length = sum(shard.length for shard in self._maps)
        written = sum(unit.end - unit.start for unit in self.units)
        return length + self.space_needs(block).before[-1] - written
