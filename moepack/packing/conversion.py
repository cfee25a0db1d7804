"""Carry units from shards to pack or back, so that each byte is safe in one of them at any moment.

Packing, for each unit in turn:

1. its pieces are copied into the pack; the data file and its directory are synced;
2. what is cached of both sides is dropped, and both are read from the disk: they must be what was
   copied;
3. the journal says `packed`, and is synced;
4. the blocks of the shards that hold nothing else are punched, and the shards synced;
5. the journal says `punched`.

Restoring is the reverse, from the last unit to the first: copy into the holes, sync, read both from
the disk, `filled`; cut the unit off the data file, sync, `released`. A crash leaves the unit in
hand on the side that the journal names; what stands on the other one is written again, or is given
up again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moepack import digest
from moepack.errors import MachineError, PackError
from moepack.packing.in_place_journal import InPlaceJournal, State
from moepack.packing.unit_files import BUFFER_LENGTH, PackSide, ShardSide, Side
from moepack.packing.units import FreeableBlocks, Piece, Unit
from moepack.storage import holes
from moepack.storage.thread_pool import ThreadPool

_HINT = (
    "the drive or the memory is failing: nothing was given up; copy the model elsewhere while it"
    " can be read"
)


class Conversion:
    """Units on their way; `advanced` is called with the bytes that were carried, by one thread."""

    def __init__(
        self,
        sides: tuple[ShardSide, PackSide],
        units: Sequence[Unit],
        journal: InPlaceJournal,
        threads: int,
        advanced: Callable[[int], None],
    ) -> None:
        self._shards, self._pack = sides
        self._units = units
        self._journal = journal
        self._threads = threads
        self._advanced = advanced

    def pack(self, blocks: FreeableBlocks) -> None:
        """Bring all units into the pack; `blocks` is fresh, and is used up."""
        for unit in self._units:
            if not self._journal.state(unit).is_in_pack:
                self._check_no_holes(unit)
                digests = self._carry(unit, self._shards, self._pack)
                self._journal.note(unit, State.PACKED, digests)
            freed = [found for piece in unit.pieces if (found := _freed(blocks, piece))]
            if self._journal.state(unit) != State.PUNCHED:
                self._punch(freed)
                self._journal.note(unit, State.PUNCHED)

    def restore(self) -> None:
        """Bring all units back into the shards."""
        for unit in reversed(self._units):
            if self._journal.state(unit).is_in_pack:
                digests = self._carry(unit, self._pack, self._shards)
                self._journal.note(unit, State.FILLED, digests)
            if self._journal.state(unit) != State.RELEASED:
                self._pack.truncate(unit)
                self._pack.sync({unit.file})
                self._journal.note(unit, State.RELEASED)

    def digest(self, pieces: Iterable[Piece], side: Side) -> array[int]:
        """Return the digests of pieces as they are read from one side."""
        with ThreadPool(max_workers=self._threads) as threads:
            return array("Q", threads.map(side.digest, pieces))

    def _carry(self, unit: Unit, source: Side, target: Side) -> array[int]:
        """Copy a unit, sync it, read it back, and return the digests of its pieces."""
        source.open(unit)
        target.open(unit)
        digests = self._copy(unit, source, target)
        self._check_known(unit, digests, source)
        if target is self._pack:
            self._pack.pad(unit)
        target.sync(target.files(unit))
        for side in (target, source):
            side.forget(side.files(unit))
        for side in (target, source):
            self._compare(unit, digests, side)
        if target is self._pack and not self._pack.is_padded(unit):
            raise _differs(
                target.paths[unit.file], f"between bytes {unit.start:,} and {unit.end:,}"
            )
        return digests

    def _copy(self, unit: Unit, source: Side, target: Side) -> array[int]:
        def copy(piece: Piece) -> int:
            file, offset = target.place(piece)
            computed = digest.stream()
            buffer = memoryview(bytearray(min(BUFFER_LENGTH, piece.length)))
            for data in source.read(*source.place(piece), piece.length, buffer):
                computed.update(data)
                target.write(file, offset, data)
                offset += len(data)
            return computed.intdigest()

        digests = array("Q")
        with ThreadPool(max_workers=self._threads) as threads:
            try:
                for piece, computed in zip(
                    unit.pieces, threads.map(copy, unit.pieces), strict=True
                ):
                    digests.append(computed)
                    self._advanced(piece.length)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        return digests

    def _check_known(self, unit: Unit, digests: array[int], source: Side) -> None:
        """Compare what was read of the pack with what is known of it."""
        if source is not self._pack:
            return
        noted = self._journal.digests(unit)
        expected = [piece.digest for piece in unit.pieces] if noted is None else noted
        for piece, known, found in zip(unit.pieces, expected, digests, strict=True):
            if known is not None and known != found:
                raise PackError(
                    "the pack is damaged: its bytes do not have their digest",
                    path=source.paths[piece.file],
                    place=f"{piece.label} at byte {piece.offset:,}",
                    expected=digest.to_text(known),
                    found=digest.to_text(found),
                )

    def _compare(self, unit: Unit, digests: array[int], side: Side) -> None:
        for piece, expected, found in zip(
            unit.pieces, digests, self.digest(unit.pieces, side), strict=True
        ):
            if expected != found:
                file, offset = side.place(piece)
                place = f"{piece.label} at byte {offset:,}"
                both = digest.to_text(expected), digest.to_text(found)
                raise _differs(side.paths[file], place, *both)

    def _check_no_holes(self, unit: Unit) -> None:
        """Raise MachineError where what the shards are to give is a hole already."""
        for piece in unit.pieces:
            descriptor = self._shards.descriptor(piece.shard)
            hole = holes.hole_in(descriptor, piece.shard_offset, piece.shard_offset + piece.length)
            if hole is not None:
                path = self._shards.paths[piece.shard]
                self._journal.fail(
                    f"{path.name} has a hole at byte {hole:,}, of which it knows not"
                )

    def _punch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Give blocks of shards back, as few ranges at a time as there are."""
        joined: list[list[int]] = []
        for shard, start, end in sorted(ranges):
            if joined and joined[-1][0] == shard and joined[-1][2] >= start:
                joined[-1][2] = max(joined[-1][2], end)
            else:
                joined.append([shard, start, end])
        for shard, start, end in joined:
            holes.punch(self._shards.descriptor(shard), start, end - start)
        self._shards.sync({shard for shard, _, _ in joined})


def _freed(blocks: FreeableBlocks, piece: Piece) -> tuple[int, int, int] | None:
    freed = blocks.add(piece)
    return None if freed is None else (piece.shard, *freed)


def _differs(
    path: Path, place: str, expected: str = "zeros", found: str = "others"
) -> MachineError:
    return MachineError(
        "what is read back from the drive is not what was copied",
        path=path,
        place=place,
        expected=expected,
        found=found,
        hint=_HINT,
    )
