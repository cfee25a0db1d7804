"""Move units from shards to pack or back, each byte safe on one side at any moment.

Packing, for each unit in turn:

1. those of its pieces that are not in the pack are copied there, and must have their digests; the
   data file and its directory are synced;
2. what is cached of the pack is dropped, and the pieces are read from the disk: they must have
   their digests again;
3. the blocks of the shards that hold nothing else are punched, and the shards synced.

Restoring is the reverse, from the last unit to the first: copy into the holes, sync, read from the
disk, and cut the unit off the data file. The digests are those of bytes that were read before
anything was touched, so both sides are read twice. A crash leaves the current unit on the side that
it came from; digests tell which that is: every byte is read, on one side or the other, before
anything is written. So nothing is ever given up for bytes that are not there, whatever a journal
says, and whichever program, drive or copy changed a file since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, SourceError
from moepack.packing.in_place.unit_files import FileSet, PackFiles, ShardFiles
from moepack.packing.in_place.units import FreeableBlocks, Piece, PieceKey, Unit, Units
from moepack.storage import blocks
from moepack.storage.thread_pool import ThreadPool

T = TypeVar("T")

_BATCH_COUNT = 1024
"""Pieces that are handed to threads at a time."""

Digests = tuple[int, list[int], int]
"""A piece's digest, those of its cut pieces, and how many of these are in the pack."""


@dataclass(slots=True)
class PieceLocations:
    """The digests of all pieces, and the keys of the pieces in the pack.

    Pieces are those of units, so that no piece is longer than a unit. `uncut` has the digests of
    the pieces that were longer before. `compared_length` is the bytes that had the digest expected.
    """

    digests: dict[PieceKey, int] = field(default_factory=dict)
    uncut: dict[PieceKey, int] = field(default_factory=dict)
    in_pack: set[PieceKey] = field(default_factory=set)
    compared_length: int = 0

    def has(self, piece: Piece) -> bool:
        """Return whether a piece is in the pack."""
        return piece.key in self.in_pack

    def any(self, unit: Unit) -> bool:
        """Return whether any piece of a unit is in the pack."""
        return any(map(self.has, unit.pieces))


def _each(
    work: Callable[[Piece], T], pieces: Sequence[Piece], threads: int
) -> Iterator[tuple[Piece, T]]:
    """Yield each piece with the result of `work`, which threads do."""
    with ThreadPool(max_workers=threads) as pool:
        for start in range(0, len(pieces), _BATCH_COUNT):
            batch = pieces[start : start + _BATCH_COUNT]
            yield from zip(batch, pool.map(work, batch), strict=True)


class PieceSearch:
    """Looks for pieces on both sides; a piece that is longer than a unit may lie on both.

    With `pack_first` it looks in the pack first, otherwise in the shards.
    """

    def __init__(self, units: Units, pack: PackFiles, shards: ShardFiles, pack_first: bool) -> None:
        self._pack, self._shards = pack, shards
        self._units = units
        self._pack_first = pack_first

    def run(
        self, pieces: Sequence[Piece], threads: int, advanced: Callable[[int], None]
    ) -> PieceLocations:
        """Find each of `pieces`; raise PackError if neither side has one with its digest."""
        locations = PieceLocations()
        missing = []
        for piece, result in _each(self._find, pieces, threads):
            advanced(piece.length)
            if result is None:
                missing.append(piece)
                continue
            whole, digests, in_pack_count = result
            if piece.digest is not None:
                locations.compared_length += piece.length
            cut = list(piece.cut(self._units.length))
            if len(cut) > 1:
                locations.uncut[piece.key] = whole
            locations.digests.update(zip((part.key for part in cut), digests, strict=True))
            locations.in_pack.update(part.key for part in cut[:in_pack_count])
        if missing:
            raise self._lost(missing)
        return locations

    def is_in_shard(self, piece: Piece) -> bool:
        """Return whether all of a piece is in its shard."""
        digests = self._read([piece], 0)
        return digests is not None and digests[0] == piece.digest

    def _find(self, piece: Piece) -> Digests | None:
        """Return the digests of a piece; None if neither side has it.

        The first cut pieces are in the pack: packing and restoring leave them so.
        """
        cut = list(piece.cut(self._units.length))
        counts = list(range(len(cut), -1, -1))
        if not self._pack_first:
            counts = [0, *counts[:-1]]
        for count in counts:
            digests = self._read(cut, count)
            if digests is not None and piece.digest in (None, digests[0]):
                return digests[0], digests[1:], count
        return None

    def _read(self, cut: Sequence[Piece], in_pack_count: int) -> list[int] | None:
        """Return the digest of all cut pieces together and of each; None if one is unreadable."""
        sides = [self._pack if n < in_pack_count else self._shards for n in range(len(cut))]
        if not all(side.reaches(part) for side, part in zip(sides, cut, strict=True)):
            return None
        whole = digest.stream()
        digests = []
        for side, part in zip(sides, cut, strict=True):
            single = digest.stream() if len(cut) > 1 else whole
            try:
                for data in side.read_piece(part):
                    single.update(data)
                    if single is not whole:
                        whole.update(data)
            except MoepackError:  # a bad sector: perhaps the other side has the bytes
                return None
            digests.append(single.intdigest())
        return [whole.intdigest(), *digests]

    def _lost(self, missing: Sequence[Piece]) -> MoepackError:
        """Return the error for pieces that are on neither side."""
        piece, names = missing[0], self._units.shard_names
        path = self._pack.paths[piece.file] or self._shards.paths[piece.shard]
        place = f"{piece.label} at byte {piece.offset:,}"
        absent = [name for name, path in zip(names, self._shards.paths, strict=True) if not path]
        if len(absent) == len(names) and self._pack.reaches(piece):
            problem = "the pack is damaged: its bytes do not have their digest"
            return PackError(problem, path=path, place=place, hint="run `moepack verify` on it")
        return PackError(
            "neither the pack nor the shards have its original bytes",
            path=path,
            place=place,
            expected=None if piece.digest is None else digest.to_text(piece.digest),
            found=f"{len(missing):,} such pieces in all"
            + (f", and not the shards {', '.join(absent)}" if absent else ""),
            hint="nothing was changed; copy the directory while it can be read, and look for the"
            " program that changed it, a failing drive, or a missing shard",
        )


@dataclass(slots=True)
class Conversion:
    """Units on their way; `advanced` is called with the bytes that were moved, by one thread.

    `given_up` is called before any byte is taken from a side that has it.
    """

    shards: ShardFiles
    data_files: PackFiles
    locations: PieceLocations
    threads: int
    advanced: Callable[[int], None]
    given_up: Callable[[], None]

    def pack(self, units: Sequence[Unit], freeable: FreeableBlocks) -> None:
        """Bring all units into the pack; `freeable` is fresh, and is used up."""
        for file, of_file in groupby(units, key=lambda unit: unit.file):
            for unit in of_file:
                missing = [piece for piece in unit.pieces if not self.locations.has(piece)]
                if missing or not self.data_files.is_padded(unit):
                    self._move(unit, missing, self.shards, self.data_files)
                    self.locations.in_pack.update(piece.key for piece in missing)
                self._punch(unit, freeable)
            self.data_files.truncate(file, unit.end)

    def restore(self, units: Sequence[Unit]) -> None:
        """Bring all units back into the shards."""
        for unit in reversed(units):
            pieces = [piece for piece in unit.pieces if self.locations.has(piece)]
            if pieces:
                self._move(unit, pieces, self.data_files, self.shards)
                self.locations.in_pack.difference_update(piece.key for piece in pieces)
            self.given_up()
            if self.data_files.truncate(unit.file, unit.start):
                self.data_files.sync({unit.file})

    def _move(self, unit: Unit, pieces: Sequence[Piece], source: FileSet, target: FileSet) -> None:
        """Copy pieces of a unit, sync them, and read them back."""
        source.open(source.files(unit))
        files = target.files(unit)
        target.open(files)
        self._copy(pieces, source, target)
        if target is self.data_files:
            self.data_files.pad(unit)
        target.sync(files)
        target.drop_cached(files)
        self._compare(pieces, target)
        if target is self.data_files and not self.data_files.is_padded(unit):
            place = f"between bytes {unit.start:,} and {unit.end:,}"
            raise _differs(target, unit.file, place, "zeros", "others")

    def _copy(self, pieces: Sequence[Piece], source: FileSet, target: FileSet) -> None:
        """Copy pieces; raise the fault of the source if one does not have its digest there."""

        def copy(piece: Piece) -> int:
            file, offset = target.locate(piece)
            computed = digest.stream()
            for data in source.read_piece(piece):
                computed.update(data)
                target.write(file, offset, data)
                offset += len(data)
            return computed.intdigest()

        for piece, computed in _each(copy, pieces, self.threads):
            expected = self.locations.digests[piece.key]
            if computed != expected:
                file, offset = source.locate(piece)
                fault = PackError if source is self.data_files else SourceError
                raise fault(
                    "the second read returned other bytes",
                    path=source.paths[file],
                    place=f"{piece.label} at byte {offset:,}",
                    expected=digest.to_text(expected),
                    found=digest.to_text(computed),
                    hint="another program writes to it, or the drive or the memory is failing:"
                    " nothing was freed",
                )
            self.advanced(piece.length)

    def _compare(self, pieces: Sequence[Piece], target: FileSet) -> None:
        for piece, computed in _each(target.digest, pieces, self.threads):
            expected = self.locations.digests[piece.key]
            if computed != expected:
                file, offset = target.locate(piece)
                place = f"{piece.label} at byte {offset:,}"
                digests = digest.to_text(expected), digest.to_text(computed)
                raise _differs(target, file, place, *digests)

    def _punch(self, unit: Unit, freeable: FreeableBlocks) -> None:
        """Free the blocks of shards that hold nothing else, in as few ranges as possible."""
        ranges = sorted(
            (piece.shard, *block_range)
            for piece in unit.pieces
            if (block_range := freeable.add(piece)) and self.shards.paths[piece.shard]
        )
        joined: list[tuple[int, int, int]] = []
        for shard, start, end in ranges:
            if joined and joined[-1][0] == shard and joined[-1][2] >= start:
                _, start, last_end = joined.pop()
                end = max(end, last_end)
            joined.append((shard, start, end))
        for shard, start, end in joined:
            self.given_up()
            blocks.punch(self.shards.descriptor(shard), start, end - start)
        self.shards.sync({shard for shard, _, _ in joined})


def _differs(side: FileSet, file: int, place: str, expected: str, actual: str) -> MachineError:
    return MachineError(
        "the drive returned other bytes than were written",
        path=side.paths[file],
        place=place,
        expected=expected,
        found=actual,
        hint="the drive or the memory is failing; nothing was freed: copy the model"
        " elsewhere while it can be read",
    )
