"""Carry units from shards to pack or back, so that each byte is safe in one of them at any moment.

Packing, for each unit in turn:

1. those of its pieces that are not in the pack are copied there, and must have their digests; the
   data file and its directory are synced;
2. what is cached of the pack is dropped, and the pieces are read from the disk: they must have
   their digests again;
3. the blocks of the shards that hold nothing else are punched, and the shards synced.

Restoring is the reverse, from the last unit to the first: copy into the holes, sync, read from the
disk, and cut the unit off the data file. The digests are those of bytes that were read before
anything was touched, so both sides are read twice. A crash leaves the unit in hand on the side that
it came from; digests tell which that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moepack import digest
from moepack.errors import MachineError, PackError, SourceError
from moepack.packing.piece_locations import PieceLocations
from moepack.packing.unit_files import PackSide, ShardSide, Side
from moepack.packing.units import FreeableBlocks, Piece, Unit
from moepack.storage import holes
from moepack.storage.thread_pool import ThreadPool


class Conversion:
    """Units on their way; `advanced` is called with the bytes that were carried, by one thread.

    `has_given_up` is whether any byte was taken from a side that had it.
    """

    def __init__(
        self,
        sides: tuple[ShardSide, PackSide],
        units: Sequence[Unit],
        locations: PieceLocations,
        threads: int,
        advanced: Callable[[int], None],
    ) -> None:
        self._shards, self._pack = sides
        self._units = units
        self._locations = locations
        self._threads = threads
        self._advanced = advanced
        self.has_given_up = False

    def pack(self, blocks: FreeableBlocks) -> None:
        """Bring all units into the pack; `blocks` is fresh, and is used up."""
        in_pack = self._locations.in_pack
        for unit in self._units:
            missing = [piece for piece in unit.pieces if not self._locations.has(piece)]
            if missing or not self._pack.is_padded(unit):
                self._carry(unit, missing, self._shards, self._pack)
                in_pack.update(piece.key for piece in missing)
            self._punch(unit, blocks)
            if (
                unit.number + 1 == len(self._units)
                or self._units[unit.number + 1].file != unit.file
            ):
                self._pack.truncate(unit.file, unit.end)

    def restore(self) -> None:
        """Bring all units back into the shards."""
        in_pack = self._locations.in_pack
        for unit in reversed(self._units):
            carried = [piece for piece in unit.pieces if self._locations.has(piece)]
            if carried:
                self._carry(unit, carried, self._pack, self._shards)
                in_pack.difference_update(piece.key for piece in carried)
            self.has_given_up = True
            if self._pack.truncate(unit.file, unit.start):
                self._pack.sync({unit.file})

    def _carry(self, unit: Unit, pieces: Sequence[Piece], source: Side, target: Side) -> None:
        """Copy pieces of a unit, sync them, and read them back."""
        source.open(source.files(unit))
        target.open(target.files(unit))
        self._copy(pieces, source, target)
        if target is self._pack:
            self._pack.pad(unit)
        target.sync(target.files(unit))
        target.forget(target.files(unit))
        self._compare(pieces, target)
        if target is self._pack and not self._pack.is_padded(unit):
            place = f"between bytes {unit.start:,} and {unit.end:,}"
            raise _differs(target, unit.file, place, "zeros", "others")

    def _copy(self, pieces: Sequence[Piece], source: Side, target: Side) -> None:
        """Copy pieces, and raise the fault of the source if one has not its digest there."""

        def copy(piece: Piece) -> int:
            file, offset = target.place(piece)
            computed = digest.stream()
            for data in source.read_piece(piece):
                computed.update(data)
                target.write(file, offset, data)
                offset += len(data)
            return computed.intdigest()

        with ThreadPool(max_workers=self._threads) as threads:
            try:
                for piece, computed in zip(pieces, threads.map(copy, pieces), strict=True):
                    self._check_source(piece, computed, source)
                    self._advanced(piece.length)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _check_source(self, piece: Piece, computed: int, source: Side) -> None:
        expected = self._locations.digests[piece.key]
        if computed == expected:
            return
        file, offset = source.place(piece)
        fault = PackError if source is self._pack else SourceError
        raise fault(
            "read for the second time, its bytes are others",
            path=source.paths[file],
            place=f"{piece.label} at byte {offset:,}",
            expected=digest.to_text(expected),
            found=digest.to_text(computed),
            hint="another program writes to it, or the drive or the memory is failing: nothing"
            " was given up for it",
        )

    def _compare(self, pieces: Sequence[Piece], target: Side) -> None:
        with ThreadPool(max_workers=self._threads) as threads:
            digests = threads.map(target.digest, pieces)
            for piece, computed in zip(pieces, digests, strict=True):
                expected = self._locations.digests[piece.key]
                if computed != expected:
                    file, offset = target.place(piece)
                    place = f"{piece.label} at byte {offset:,}"
                    both = digest.to_text(expected), digest.to_text(computed)
                    raise _differs(target, file, place, *both)

    def _punch(self, unit: Unit, blocks: FreeableBlocks) -> None:
        """Give back the blocks of shards that hold nothing else, as few ranges as there are."""
        joined: list[list[int]] = []
        for shard, start, end in sorted(_freed(unit, blocks)):
            if self._shards.paths[shard] is None:
                continue
            if joined and joined[-1][0] == shard and joined[-1][2] >= start:
                joined[-1][2] = max(joined[-1][2], end)
            else:
                joined.append([shard, start, end])
        for shard, start, end in joined:
            self.has_given_up = True
            holes.punch(self._shards.descriptor(shard), start, end - start)
        self._shards.sync({shard for shard, _, _ in joined})


def _freed(unit: Unit, blocks: FreeableBlocks) -> Iterable[tuple[int, int, int]]:
    """Yield shard, start and end of each range that may go once a unit is in the pack."""
    for piece in unit.pieces:
        freed = blocks.add(piece)
        if freed is not None:
            yield piece.shard, *freed


def _differs(side: Side, file: int, place: str, expected: str, found: str) -> MachineError:
    return MachineError(
        "what is read back from the drive is not what was copied",
        path=side.paths[file],
        place=place,
        expected=expected,
        found=found,
        hint="the drive or the memory is failing: nothing was given up; copy the model elsewhere"
        " while it can be read",
    )
