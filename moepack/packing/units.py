"""Units: what is moved between shards and pack in one go, where there is room for one copy only.

Pure: no file is opened. A unit is a stretch of a data file with the pieces of shards that belong
there. Units go from the first file's start to the last one's end. Packing takes them by rising
numbers and restoring by falling ones, so that at any moment those before some number are in the
pack, and the others in the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moepack.format.index import Index
from moepack.reading.shard_map import ShardMap
from moepack.sizes import align

MAX_LENGTH = 256 << 20
"""Of a unit; one layer where that is less. A run loses no more than this when it is interrupted."""
CUT_ALIGNMENT = 64 << 10
"""Of the places where what is larger than a unit is cut."""


class PieceKey(NamedTuple):
    """A piece by its place in the pack: the number of the data file, and the offset in it."""

    file: int
    offset: int


class Piece(NamedTuple):
    """The same bytes in two places: in file number `file` of the pack, and in a shard.

    Offsets count from the start of the file and of the shard, and `length` is in bytes. `digest` is
    None where it is not known.
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
        """Where they end in the file."""
        return self.offset + self.length

    @property
    def key(self) -> PieceKey:
        """The key of the piece."""
        return PieceKey(self.file, self.offset)

    def cut(self, length: int) -> Iterator[Piece]:
        """Yield it in pieces of up to `length` bytes; the digests of these are not known."""
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

    @property
    def length(self) -> int:
        """The bytes that it takes in the pack."""
        return self.end - self.start


def file_lengths(index: Index) -> list[int]:
    """Return the lengths of the data files."""
    return [file.length for file in index.files]


def unit_length(index: Index) -> int:
    """Return the length of a unit: that of all blobs of the largest layer, at most MAX_LENGTH."""
    layers: dict[int, int] = {}
    for family in index.families:
        length = family.expert_count * index.blob(family.first_blob)[1]
        layers[family.layer] = layers.get(family.layer, 0) + length
    largest = align(max(layers.values()), CUT_ALIGNMENT)
    return min(largest, MAX_LENGTH)


def pieces_of(shards: Sequence[ShardMap]) -> list[Piece]:
    """List what all shards consist of, in the order of the pack; what has no bytes is left out."""
    pieces = [
        Piece(p.length, p.file, p.offset, shard, p.shard_offset, p.digest, p.label)
        for shard, mapped in enumerate(shards)
        for p in mapped.pieces
    ]
    return sorted(pieces, key=lambda piece: (piece.file, piece.offset))


def cut(pieces: Sequence[Piece], file_lengths: Sequence[int], length: int) -> list[Unit]:
    """Cut the data files into units of at most `length` bytes, a multiple of CUT_ALIGNMENT.

    Only a piece that is longer than that is cut itself.
    """
    units: list[Unit] = []
    by_file: list[list[Piece]] = [[] for _ in file_lengths]
    for piece in pieces:
        by_file[piece.file].append(piece)
    for file, file_length in enumerate(file_lengths):
        start, held = 0, list[Piece]()
        for piece in (small for whole in by_file[file] for small in whole.cut(length)):
            if held and piece.end - start > length:
                units.append(Unit(len(units), file, start, piece.offset, tuple(held)))
                start, held = piece.offset, []
            held.append(piece)
        if file_length > start:
            units.append(Unit(len(units), file, start, file_length, tuple(held)))
    return units


class FreeableBlocks:
    """Which blocks of the shards hold nothing any more that is not in the pack.

    A block is `block` bytes, and neighbours share those at their borders: only when both are in the
    pack may it go. Zeros between pieces are nobody's. `freed_length` is how many bytes the file
    system has back for sure: where it keeps extents of up to `extent` bytes as long as any byte of
    them is in use, that is less than what was punched.
    """

    def __init__(self, shards: Sequence[ShardMap], block: int, extent: int = 0) -> None:
        self.freed_length = 0
        self._block = block
        self._extent = extent
        self._lengths = [shard.length for shard in shards]
        self._end_of: list[dict[int, int]] = []
        """By shard, where each range that may go ends, by where it starts."""
        self._start_of: list[dict[int, int]] = []
        for shard in shards:
            self._end_of.append({})
            self._start_of.append({})
            position = 0
            for piece in shard.pieces:
                self._join(len(self._end_of) - 1, position, piece.shard_offset)
                position = piece.end
            self._join(len(self._end_of) - 1, position, shard.length)

    def add(self, piece: Piece) -> tuple[int, int] | None:
        """Note that a piece is in the pack; return where the blocks start and end that may go now.

        A shard's header stays to the end: it says what the file was.
        """
        if piece.shard_offset == 0:
            return None
        shard, start = piece.shard, piece.shard_offset
        end = start + piece.length
        joined_start, joined_end = self._join(shard, start, end)
        if joined_end == self._lengths[shard]:  # nothing of another file is in the last block
            joined_end = align(joined_end, self._block)
        if self._extent:
            self.freed_length += self._sure(shard, joined_start, joined_end)
            self.freed_length -= self._sure(shard, joined_start, start)
            self.freed_length -= self._sure(shard, end, joined_end)
        block = self._block
        first = max(align(joined_start, block), start - start % block)
        last = min(joined_end - joined_end % block, align(end, block))
        if first >= last:
            return None
        if not self._extent:
            self.freed_length += last - first
        return first, last

    def _sure(self, shard: int, start: int, end: int) -> int:
        """Return what is free of a range at least: an extent may reach over each of its ends."""
        kept = self._extent * ((start > 0) + (end < self._lengths[shard]))
        return max(0, end - start - kept)

    def _join(self, shard: int, start: int, end: int) -> tuple[int, int]:
        """Add a range to those beside it, and return what they are together."""
        if start >= end:
            return start, end
        ends, starts = self._end_of[shard], self._start_of[shard]
        joined_start = starts.pop(start, start)
        joined_end = ends.pop(end, end)
        ends[joined_start] = joined_end
        starts[joined_end] = joined_start
        return joined_start, joined_end


class Room(NamedTuple):
    """How many bytes pack and shards together take beyond the shards, as the units go over.

    `before[n]` is with the units before n in the pack and nowhere else, `during[n]` while unit n is
    in both. `before` has one more, for when all are in the pack.
    """

    before: tuple[int, ...]
    during: tuple[int, ...]

    def to_pack(self, first: int) -> int:
        """Return what it takes more to pack from unit `first` on."""
        return max((*self.during[first:], self.before[-1])) - self.before[first]

    def to_restore(self, count: int) -> int:
        """Return what it takes more to restore the first `count` units."""
        return max((*self.during[:count], 0)) - self.before[count]


def room(units: Sequence[Unit], blocks: FreeableBlocks) -> Room:
    """Compute what room the units take; `blocks` is fresh, and is used up."""
    written = 0
    before, during = [0], []
    for unit in units:
        written += unit.length
        during.append(written - blocks.freed_length)
        for piece in unit.pieces:
            blocks.add(piece)
        before.append(written - blocks.freed_length)
    return Room(tuple(before), tuple(during))


class Units:
    """The units of a model: its pieces, and the data files cut into stretches of `length` bytes.

    `pieces` are uncut, in the order of the pack; those of `units` are cut.
    """

    def __init__(self, maps: Sequence[ShardMap], file_lengths: Sequence[int], length: int) -> None:
        self._maps = maps
        self.length = length
        self.shard_names = [shard.name for shard in maps]
        self.pieces = pieces_of(maps)
        self.units = cut(self.pieces, file_lengths, length)

    def blocks(self, block: int) -> FreeableBlocks:
        """Return the blocks of the shards, of `block` bytes each."""
        return FreeableBlocks(self._maps, block)

    def room(self, block: int, extent: int = 0) -> Room:
        """Compute what room they take; `block` and `extent` as for FreeableBlocks."""
        return room(self.units, FreeableBlocks(self._maps, block, extent))

    def absent_length(self, block: int) -> int:
        """Return what shards that are not there yet take beyond what packing would free of them."""
        length = sum(shard.length for shard in self._maps)
        return length + self.room(block).before[-1] - sum(unit.length for unit in self.units)
