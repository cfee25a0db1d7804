"""Which pieces of a model are in the pack and which in the shards: found out by their digests.

Every byte is read, on one side or the other, before anything is written. So nothing is ever given
up for bytes that are not there, whatever a journal says, and whichever program, drive or copy
changed a file since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moepack import digest
from moepack.errors import MoepackError, PackError
from moepack.packing.unit_files import PackSide, ShardSide
from moepack.packing.units import Piece, PieceKey, Unit, Units
from moepack.storage.thread_pool import ThreadPool

_BATCH_COUNT = 1024
"""Pieces that are handed to threads at a time."""


@dataclass(frozen=True, slots=True)
class PieceLocations:
    """The digests of all pieces, and the keys of those that are in the pack.

    Pieces are those of units, so that no piece is longer than a unit. `cut` has the digests of
    the pieces that were longer before.
    """

    digests: dict[PieceKey, int] = field(default_factory=dict)
    cut: dict[PieceKey, int] = field(default_factory=dict)
    in_pack: set[PieceKey] = field(default_factory=set)

    def has(self, piece: Piece) -> bool:
        """Return whether a piece is in the pack."""
        return piece.key in self.in_pack

    def any(self, unit: Unit) -> bool:
        """Return whether any piece of a unit is in the pack."""
        return any(map(self.has, unit.pieces))

    def all(self, unit: Unit) -> bool:
        """Return whether all pieces of a unit are in the pack."""
        return all(map(self.has, unit.pieces))


def digest_shards(
    units: Units, shards: ShardSide, threads: int, advanced: Callable[[int], None]
) -> PieceLocations:
    """Read all of the shards; return the digests of the pieces, none of them in the pack."""
    pack = PackSide([None] * (1 + max(piece.file for piece in units.pieces)))
    anything = [piece._replace(digest=None) for piece in units.pieces]
    anything.sort(key=lambda piece: (piece.shard, piece.shard_offset))
    shards.open_all()
    return _Search(units, pack, shards, False).run(anything, threads, advanced)


def locate(
    units: Units,
    pack: PackSide,
    shards: ShardSide,
    threads: int,
    advanced: Callable[[int], None],
    *,
    pack_first: bool,
    whole_shards: Sequence[int] = (),
) -> PieceLocations:
    """Find every piece, in the pack or, if `pack_first` is false, rather in the shards.

    Shards whose numbers are in `whole_shards` have to be whole: another file is dropped from
    `shards`. Raises PackError if a piece is on neither side as its digest says.
    """
    pack.open_all()
    shards.open_all()
    search = _Search(units, pack, shards, pack_first)
    for number in whole_shards:
        pieces = [piece for piece in units.pieces if piece.shard == number]
        if not all(search.is_in_shard(piece) for piece in pieces):
            shards.drop(number)
    locations = search.run(units.pieces, threads, advanced)
    pack.forget_all()
    shards.forget_all()
    return locations


class _Search:
    """Looks for pieces on both sides; a piece that is longer than `length` may lie on both."""

    def __init__(self, units: Units, pack: PackSide, shards: ShardSide, pack_first: bool) -> None:
        self._pack, self._shards = pack, shards
        self._length = units.length
        self._names = units.shard_names
        self._pack_first = pack_first

    def run(
        self, pieces: Sequence[Piece], threads: int, advanced: Callable[[int], None]
    ) -> PieceLocations:
        """Find all pieces."""
        locations = PieceLocations()
        missing = []
        for piece, search_result in self._find_all(pieces, threads):
            advanced(piece.length)
            if search_result is None:
                missing.append(piece)
                continue
            whole, digests, in_pack_count = search_result
            parts = list(piece.cut(self._length))
            if len(parts) > 1:
                locations.cut[piece.key] = whole
            for number, part in enumerate(parts):
                locations.digests[part.key] = digests[number]
                if number < in_pack_count:
                    locations.in_pack.add(part.key)
        if missing:
            raise self._lost(missing)
        return locations

    def _find_all(
        self, pieces: Sequence[Piece], threads: int
    ) -> Iterator[tuple[Piece, tuple[int, list[int], int] | None]]:
        """Yield each piece with what `_find` returns, in their order."""
        with ThreadPool(max_workers=threads) as pool:
            try:
                for start in range(0, len(pieces), _BATCH_COUNT):
                    batch = pieces[start : start + _BATCH_COUNT]
                    yield from zip(batch, pool.map(self._find, batch), strict=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def is_in_shard(self, piece: Piece) -> bool:
        """Return whether all of a piece is in its shard."""
        digests = self._read([piece], 0)
        return digests is not None and digests[0] == piece.digest

    def _find(self, piece: Piece) -> tuple[int, list[int], int] | None:
        """Return a piece's digest, those of its parts, and how many of these are in the pack.

        The first ones are: packing and restoring leave them so. None where it is not to be found.
        """
        parts = list(piece.cut(self._length))
        counts = list(range(len(parts), -1, -1))
        if not self._pack_first:
            counts = [0, *counts[:-1]]
        for count in counts:
            digests = self._read(parts, count)
            if digests is not None and piece.digest in (None, digests[0]):
                return digests[0], digests[1:], count
        return None

    def _read(self, parts: Sequence[Piece], in_pack_count: int) -> list[int] | None:
        """Return the digest of all parts together and that of each; None if one is unreadable."""
        sides = [self._pack if n < in_pack_count else self._shards for n in range(len(parts))]
        if not all(side.reaches(part) for side, part in zip(sides, parts, strict=True)):
            return None
        whole = digest.stream()
        digests = []
        for side, part in zip(sides, parts, strict=True):
            single = digest.stream() if len(parts) > 1 else whole
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
        piece = missing[0]
        path = self._pack.paths[piece.file] or self._shards.paths[piece.shard]
        place = f"{piece.label} at byte {piece.offset:,}"
        absent = [
            name for name, path in zip(self._names, self._shards.paths, strict=True) if not path
        ]
        if len(absent) == len(self._names) and self._pack.reaches(piece):
            problem = "the pack is damaged: its bytes do not have their digest"
            return PackError(problem, path=path, place=place, hint="run `moepack verify` on it")
        return PackError(
            "neither the pack nor the shards have its bytes as they were",
            path=path,
            place=place,
            expected=None if piece.digest is None else digest.to_text(piece.digest),
            found=f"{len(missing):,} such pieces in all"
            + (f", and not the shards {', '.join(absent)}" if absent else ""),
            hint="nothing was changed; copy the directory while it can be read, and look for what"
            " changed it: a failing drive, another program, a missing shard",
        )
