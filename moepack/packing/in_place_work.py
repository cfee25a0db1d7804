"""The work in a directory that is unfinished: all units to the pack, or all back to the shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.format.index import Index
from moepack.format.source_entry import ShardEntry
from moepack.packing import in_place_draft, in_place_refusals
from moepack.packing.conversion import Conversion
from moepack.packing.in_place_draft import Draft
from moepack.packing.packer import Progress
from moepack.packing.piece_locations import PieceLocations, locate
from moepack.packing.unfinished import Unfinished, check_homes
from moepack.packing.unit_files import PackSide, ShardSide
from moepack.packing.units import Piece, Units, file_lengths
from moepack.reading.shard_map import map_shards
from moepack.storage import holes

MARGIN = 8 << 20
"""What the file system may take for itself, such as for lists of blocks."""
MARGIN_OF_PIECE = 64
"""And for each piece, for its place in such lists."""


class InPlaceRestored(NamedTuple):
    """The shards, where they are, and how many of their bytes had been in the pack."""

    entries: tuple[ShardEntry, ...]
    homes: tuple[str, ...]
    carried_length: int


class ByteProgress:
    """Adds up what is to be done, and takes what was done on to `progress`."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._total = 0

    def expect(self, length: int) -> None:
        """Count `length` bytes more as still to be done."""
        self._total += length

    def __call__(self, length: int) -> None:
        """Count `length` bytes as done."""
        if self._progress is not None:
            self._progress(length, self._total)


class Work:
    """An unfinished directory whose journal has begun, and what is done in it.

    `has_given_up` is whether any byte was taken from a side that had it.
    """

    def __init__(
        self, unfinished: Unfinished, draft: Draft, threads: int, advanced: ByteProgress
    ) -> None:
        assert unfinished.journal.beginning is not None
        self._unfinished = unfinished
        self._beginning = unfinished.journal.beginning
        self._draft = draft
        self._threads = threads
        self._advanced = advanced
        self._maps = map_shards(draft)
        self._units = Units(self._maps, file_lengths(draft.index), self._beginning.unit_length)
        self._margin = margin(self._units, draft.index)
        self._shard_paths, self._at_home = unfinished.find_shards(self._beginning.shards)
        self.has_given_up = False

    def locate(self, *, pack_first: bool) -> PieceLocations:
        """Find all pieces; nothing is changed. Raises PackError where one is lost."""
        self._advanced.expect(2 * _length(self._units.pieces))  # all may have to be carried over
        with self._sides(writable=False) as (shards, pack):
            locations = locate(
                self._units,
                pack,
                shards,
                self._threads,
                self._advanced,
                pack_first=pack_first,
                whole_shards=self._at_home,
            )
            self._shard_paths = shards.paths
        return locations

    def pack(self, locations: PieceLocations) -> int:
        """Bring all units into the pack, commit it, and remove what is left of the shards.

        Returns how many bytes were carried over.
        """
        missing = [p for unit in self._units.units for p in unit.pieces if not locations.has(p)]
        first = next((unit.number for unit in self._units.units if not locations.all(unit)), None)
        self._shard_paths = self._unfinished.take_shards(self._shard_paths)
        with self._sides(writable=True) as (shards, pack):
            if first is not None:
                extent = holes.extent_length(self._unfinished.inner)
                room = self._units.room(self._block(), extent).to_pack(first)
                self._make_room(room, pack, locations)
            conversion = self._conversion((shards, pack), locations, missing)
            try:
                conversion.pack(self._units.blocks(self._block()))
            finally:
                self.has_given_up = conversion.has_given_up
        if not in_place_draft.is_committed(self._unfinished.path, self._draft):
            self._unfinished.commit(self._draft)
        self.has_given_up = True
        self._unfinished.remove_shards()
        self._unfinished.close_up()
        return _length(missing)

    def restore(
        self, locations: PieceLocations, folder: Path | None, force: bool
    ) -> InPlaceRestored:
        """Bring all units back into the shards, these home, and remove what is left of the pack."""
        homes = self._homes(folder)
        check_homes(homes, self._unfinished.path, force, self._shard_paths)
        carried = [p for unit in self._units.units for p in unit.pieces if locations.has(p)]
        if carried:
            self._restore_units(locations, carried)
        elif [str(path) for path in self._shard_paths] != homes:
            self._shard_paths = self._unfinished.take_shards(self._shard_paths)
        self._unfinished.journal.set_homes(homes)
        self._unfinished.send_home(self._beginning.shards, homes)
        self.has_given_up = True
        self._unfinished.remove_data_files(self._draft)
        self._unfinished.close_up()
        entries = self._draft.manifest.source.shards
        return InPlaceRestored(entries, tuple(homes), _length(carried))

    def undo(self) -> None:
        """Put all back as it was before the work began; nothing was given up yet."""
        assert not self.has_given_up
        unfinished = self._unfinished
        if self._beginning.was_pack:
            if not in_place_draft.is_committed(unfinished.path, self._draft):
                unfinished.commit(self._draft)
            unfinished.remove_shards()
        else:
            unfinished.withdraw(self._draft)
            unfinished.send_home(self._beginning.shards, self._homes(None))
            unfinished.remove_data_files(self._draft)
        unfinished.close_up()

    def _restore_units(self, locations: PieceLocations, carried: Sequence[Piece]) -> None:
        unfinished, shards = self._unfinished, self._beginning.shards
        last = max(unit.number for unit in self._units.units if locations.any(unit))
        room = self._units.room(self._block()).to_restore(last + 1)
        room += holes.extent_length(unfinished.inner)
        if self._beginning.was_pack or None in self._shard_paths:
            room += self._units.absent_length(self._block())
        with self._sides(writable=True) as (_, pack):
            self._check_space(room - self._spare_length(pack, locations))
        self._shard_paths = unfinished.take_shards(self._shard_paths)
        self._shard_paths = unfinished.make_shards(self._shard_paths, shards)
        unfinished.withdraw(self._draft)
        with self._sides(writable=True) as (shard_side, pack):
            conversion = self._conversion((shard_side, pack), locations, carried)
            try:
                conversion.restore()
            finally:
                self.has_given_up = conversion.has_given_up
            for number, mapped in enumerate(self._maps):
                shard_side.round_off(number, mapped)

    def _homes(self, folder: Path | None) -> list[str]:
        """Return where the shards go: into `folder`, by default where they were."""
        if folder is not None:
            names = [shard.name for shard in self._draft.manifest.source.shards]
            return [os.path.abspath(folder / name) for name in names]
        homes = [home for home in self._unfinished.journal.homes if home is not None]
        if len(homes) < len(self._maps):
            problem = "nobody knows any more where the shards were"
            raise RequestError(problem, hint="name a folder for them with `target`")
        return homes

    def _conversion(
        self,
        sides: tuple[ShardSide, PackSide],
        locations: PieceLocations,
        carried: Sequence[Piece],
    ) -> Conversion:
        self._advanced.expect(_length(carried) - _length(self._units.pieces))
        return Conversion(sides, self._units.units, locations, self._threads, self._advanced)

    @contextmanager
    def _sides(self, *, writable: bool) -> Iterator[tuple[ShardSide, PackSide]]:
        files = [self._unfinished.path / file.name for file in self._draft.manifest.files]
        shards = ShardSide(self._shard_paths, writable=writable)
        pack = PackSide(files, writable=writable)
        try:
            yield shards, pack
        finally:
            shards.close()
            pack.close()

    def _block(self) -> int:
        return holes.block_length(self._unfinished.inner)

    def _ends(self, locations: PieceLocations) -> list[int]:
        """Return where in each data file the last unit ends of which anything is in the pack."""
        ends = [0] * len(self._draft.manifest.files)
        for unit in self._units.units:
            if locations.any(unit):
                ends[unit.file] = unit.end
        return ends

    def _spare_length(self, pack: PackSide, locations: PieceLocations) -> int:
        """Return what data files take for units of which all is in the shards."""
        ends = enumerate(self._ends(locations))
        return sum(pack.length_behind(file, end) for file, end in ends)

    def _make_room(self, room: int, pack: PackSide, locations: PieceLocations) -> None:
        """Cut off what was begun of units that are in the shards, if that makes room enough."""
        self._check_space(room - self._spare_length(pack, locations))
        self._unfinished.withdraw(self._draft)
        for file, end in enumerate(self._ends(locations)):
            pack.truncate(file, end)

    def _check_space(self, length: int) -> None:
        refusal = in_place_refusals.check_space(self._unfinished.path, length + self._margin)
        if refusal:
            raise refusal


def _length(pieces: Iterable[Piece]) -> int:
    return sum(piece.length for piece in pieces)


def margin(units: Units, index: Index) -> int:
    """Return what is needed beside the units: index and its drafts, the file system."""
    return MARGIN + MARGIN_OF_PIECE * len(units.pieces) + 4 * index.header.index_length
