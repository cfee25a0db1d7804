"""The work in a directory that is unfinished: all units to the pack, or all back to the shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moepack.common.errors import MoepackError, RequestError
from moepack.common.phases import DigestCounts, Phases, advancing
from moepack.pack.format.index import Index
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.reading.shard_map import map_shards
from moepack.packing.in_place.conversion import Conversion, PieceLocations, PieceSearch
from moepack.packing.in_place.draft import Draft
from moepack.packing.in_place.unfinished import Unfinished, check_homes
from moepack.packing.in_place.unit_files import PackFiles, ShardFiles
from moepack.packing.in_place.units import FreeableBlocks, Piece, Units
from moepack.storage import blocks
from moepack.storage.folders import check_space

MARGIN = 8 << 20
"""For the file system itself, such as for lists of blocks."""
_MARGIN_OF_PIECE = 64
"""For each piece in such lists."""


class InPlaceWork:
    """The units of an unfinished directory with a journal that has begun.

    `has_given_up` if any byte was taken from a side that had it.
    """

    def __init__(self, unfinished: Unfinished, draft: Draft, threads: int, phases: Phases) -> None:
        assert unfinished.beginning is not None
        self._unfinished = unfinished
        self._beginning = unfinished.beginning
        self._draft = draft
        self._threads = threads
        self._phases = phases
        self._maps = map_shards(draft)
        file_lengths = [file.length for file in draft.index.files]
        self._units = Units(self._maps, file_lengths, self._beginning.unit_length)
        self._shard_paths, self._at_home = unfinished.find_shards(self._beginning.shards)
        self.has_given_up = False

    def locate(self, *, pack_first: bool) -> PieceLocations:
        """Find all pieces, in the pack or, unless `pack_first`, rather in the shards.

        Nothing is changed. Raises PackError if one is lost.
        """
        length = _length(self._units.pieces)  # all may have to be moved
        advanced = advancing(self._phases.begin(later=length), length)
        with self._files(writable=False) as (shards, pack):
            pack.open_all()
            shards.open_all()
            search = PieceSearch(self._units, pack, shards, pack_first)
            for number in self._at_home:  # or another file has its name and length
                pieces = [piece for piece in self._units.pieces if piece.shard == number]
                if not all(map(search.is_in_shard, pieces)):
                    shards.drop(number)
            locations = search.run(self._units.pieces, self._threads, advanced)
            pack.drop_cached()
            shards.drop_cached()
            self._shard_paths = shards.paths
        return locations

    def pack(self, locations: PieceLocations) -> int:
        """Bring all units into the pack, commit it, and remove the rest of the shards.

        Returns how many bytes were moved.
        """
        unfinished, block = self._unfinished, self._block()
        missing = [piece for piece in self._units.cut_pieces if not locations.has(piece)]
        self._shard_paths = unfinished.take_shards(self._shard_paths)
        with self._files(writable=True) as (shards, pack):
            if missing:
                units = self._units.units
                first = next(
                    n for n, u in enumerate(units) if not all(map(locations.has, u.pieces))
                )
                extent = blocks.extent_length(unfinished.inner)
                needs = self._units.space_needs(block, extent).to_pack(first)
                self._check_space(needs - self._spare_length(pack, locations))
                unfinished.withdraw(self._draft)
                for file, end in enumerate(self._ends(locations)):
                    pack.truncate(file, end)
            conversion = self._conversion(shards, pack, locations, missing)
            conversion.pack(self._units.units, FreeableBlocks(self._maps, block))
        unfinished.commit(self._draft)
        self.has_given_up = True
        unfinished.remove_shards()
        unfinished.clean_up()
        return _length(missing)

    def restore(
        self, locations: PieceLocations, folder: Path | None, force: bool
    ) -> tuple[dict[str, ShardEntry], int, DigestCounts]:
        """Bring all units back into the shards, these home, and remove the rest of the pack.

        Returns the shards by their paths, how many bytes were moved, and how many compared.
        """
        unfinished = self._unfinished
        homes = self._homes(folder)
        check_homes(homes, unfinished.path, force, self._shard_paths)
        pieces = [piece for piece in self._units.cut_pieces if locations.has(piece)]
        if pieces:
            self._restore_units(locations, pieces)
        elif [str(path) for path in self._shard_paths] != homes:
            self._shard_paths = unfinished.take_shards(self._shard_paths)
            with self._files(writable=True) as (shard_files, _):
                shard_files.round_off(self._maps)
        unfinished.set_homes(homes)
        unfinished.restore_names(self._beginning.shards, homes)
        self.has_given_up = True
        unfinished.remove_data_files(self._draft)
        unfinished.clean_up()
        entries = self._draft.manifest.source.shards
        known_length = _length(p for p in self._units.pieces if p.digest is not None)
        unknown_length = _length(self._units.pieces) - known_length
        digests = DigestCounts(known_length, unknown_length, locations.compared_length)
        return dict(zip(homes, entries, strict=True)), _length(pieces), digests

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Put all back as it was if the block fails before any byte was given up."""
        try:
            yield
        except BaseException:
            with suppress(OSError, MoepackError):
                if not self.has_given_up:
                    self._undo()
            raise

    def _undo(self) -> None:
        unfinished = self._unfinished
        if self._beginning.was_pack:
            unfinished.commit(self._draft)
            unfinished.remove_shards()
        else:
            unfinished.withdraw(self._draft)
            unfinished.restore_names(self._beginning.shards, self._homes(None))
            unfinished.remove_data_files(self._draft)
        unfinished.clean_up()

    def _restore_units(self, locations: PieceLocations, pieces: Sequence[Piece]) -> None:
        unfinished, shards = self._unfinished, self._beginning.shards
        last = max(unit.number for unit in self._units.units if locations.any(unit))
        needs = self._units.space_needs(self._block()).to_restore(last + 1)
        needs += blocks.extent_length(unfinished.inner)
        if self._beginning.was_pack or None in self._shard_paths:
            needs += self._units.absent_length(self._block())
        with self._files(writable=True) as (_, pack):
            self._check_space(needs - self._spare_length(pack, locations))
        self._shard_paths = unfinished.take_shards(self._shard_paths)
        self._shard_paths = unfinished.make_shards(self._shard_paths, shards)
        unfinished.withdraw(self._draft)
        with self._files(writable=True) as (shard_files, pack):
            conversion = self._conversion(shard_files, pack, locations, pieces)
            conversion.restore(self._units.units)
            shard_files.round_off(self._maps)

    def _homes(self, folder: Path | None) -> list[str]:
        """Return where the shards go: into `folder`, by default where they were."""
        if folder is not None:
            names = [shard.name for shard in self._draft.manifest.source.shards]
            return [os.path.abspath(folder / name) for name in names]
        beginning = self._unfinished.beginning or self._beginning
        homes = [home for home, _, _ in beginning.shards if home is not None]
        if len(homes) < len(self._maps):
            problem = "nobody knows any more where the shards were"
            raise RequestError(problem, hint="name a folder for them with `target`")
        return homes

    def _conversion(
        self,
        shards: ShardFiles,
        pack: PackFiles,
        locations: PieceLocations,
        pieces: Sequence[Piece],
    ) -> Conversion:
        """Return the conversion that moves `pieces`."""
        advanced = advancing(self._phases.begin(), _length(pieces))
        return Conversion(shards, pack, locations, self._threads, advanced, self._give_up)

    def _give_up(self) -> None:
        self.has_given_up = True

    @contextmanager
    def _files(self, *, writable: bool) -> Iterator[tuple[ShardFiles, PackFiles]]:
        data_files = [self._unfinished.path / file.name for file in self._draft.manifest.files]
        shards = ShardFiles(self._shard_paths, writable=writable)
        pack = PackFiles(data_files, writable=writable)
        try:
            yield shards, pack
        finally:
            shards.close()
            pack.close()

    def _block(self) -> int:
        return blocks.block_length(self._unfinished.inner)

    def _ends(self, locations: PieceLocations) -> list[int]:
        """Return the end of the last unit with a piece in the pack, in each data file."""
        ends = [0] * len(self._draft.manifest.files)
        for unit in self._units.units:
            if locations.any(unit):
                ends[unit.file] = unit.end
        return ends

    def _spare_length(self, pack: PackFiles, locations: PieceLocations) -> int:
        """Return the bytes that data files take for units which are all in the shards."""
        ends = enumerate(self._ends(locations))
        return sum(pack.length_behind(file, end) for file, end in ends)

    def _check_space(self, length: int) -> None:
        length += margin(self._units, self._draft.index)
        check_space(self._unfinished.path, length)


def _length(pieces: Iterable[Piece]) -> int:
    return sum(piece.length for piece in pieces)


def margin(units: Units, index: Index) -> int:
    """Return the bytes needed beside the units: index and its drafts, the file system."""
    return MARGIN + _MARGIN_OF_PIECE * len(units.pieces) + 4 * index.header.index_length
