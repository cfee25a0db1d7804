"""The work in a directory that is unfinished: all units to the pack, or all back to the shards."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.source_entry import ShardEntry
from moepack.packing import in_place_refusals
from moepack.packing.conversion import Conversion
from moepack.packing.in_place_journal import Goal
from moepack.packing.index_digests import with_digests
from moepack.packing.packer import Progress
from moepack.packing.unfinished import Unfinished, check_homes
from moepack.packing.unit_files import PackSide, ShardSide
from moepack.packing.units import Unit, Units, file_lengths
from moepack.reading.pack import Pack
from moepack.reading.shard_map import map_shards
from moepack.storage import holes

MARGIN = 8 << 20
"""What the file system may take for itself, such as for lists of blocks."""
MARGIN_OF_PIECE = 64
"""And for each piece: its digest in the journal, and its place in such lists."""


class InPlaceRestored(NamedTuple):
    """The shards, where they are, and how many of their bytes had been in the pack."""

    entries: tuple[ShardEntry, ...]
    homes: tuple[str, ...]
    carried_length: int


class Work:
    """An unfinished directory, and what is done in it."""

    def __init__(self, unfinished: Unfinished, threads: int, progress: Progress | None) -> None:
        self._unfinished = unfinished
        self._journal = unfinished.journal
        self._threads = threads
        self._progress = progress
        beginning = unfinished.journal.beginning
        assert beginning is not None
        self._beginning = beginning
        with Pack(unfinished.inner) as draft:
            self._manifest, self._maps = draft.manifest, map_shards(draft)
            self._units = Units(
                self._maps, file_lengths(draft.index), beginning.unit_length, beginning.was_pack
            )
            self._margin = margin(self._units, draft.index)
        self._journal.take_up(self._units.units)

    def pack(self) -> None:
        """Bring all units into the pack, and commit it."""
        journal, beginning = self._journal, self._beginning
        journal.set_goal(Goal.PACK, journal.homes)
        self._unfinished.withdraw()
        self._unfinished.take_shards(beginning.shards)
        with self._sides() as (shards, pack):
            first = journal.packed_count
            if first < len(self._units.units):
                pack.truncate(self._units.units[first])
                extent = holes.extent_length(self._unfinished.inner)
                self._check_space(self._units.room(self._block(), extent).to_pack(first))
            conversion = self._conversion(shards, pack, self._units.units[first:])
            conversion.pack(self._units.blocks(self._block()))
            index = self._index(conversion, pack)
        described = self._manifest._replace(index_entry=manifest.describe_index(index))
        self._unfinished.commit(manifest.encode(described), index)
        journal.finish()
        self._unfinished.tidy()

    def restore(self, folder: Path | None, force: bool) -> InPlaceRestored:
        """Bring all units back into the shards, and these home."""
        journal, shards = self._journal, self._beginning.shards
        homes = journal.homes
        if folder is not None:
            homes = [os.path.abspath(folder / os.path.basename(shard.home)) for shard in shards]
        count = journal.packed_count
        check_homes(homes, self._unfinished.path, force, shards)
        with self._sides() as (shard_side, pack):
            if count:
                self._check_space_to_restore(count, pack)
            self._unfinished.take_shards(shards)
            journal.set_goal(Goal.SHARDS, homes)
            self._unfinished.withdraw()
            self._conversion(shard_side, pack, self._units.units[:count]).restore()
        self._unfinished.send_home(shards)
        journal.finish()
        self._unfinished.tidy()
        carried = sum(p.length for unit in self._units.units[:count] for p in unit.pieces)
        return InPlaceRestored(self._manifest.source.shards, tuple(homes), carried)

    def undo(self) -> None:
        """Put the shards back where nothing was carried over yet; else leave all as it is."""
        with contextlib.suppress(OSError, MoepackError):
            if not self._journal.packed_count and not self._journal.is_done:
                self.restore(None, force=False)

    def _conversion(self, shards: ShardSide, pack: PackSide, ahead: Sequence[Unit]) -> Conversion:
        total = sum(piece.length for unit in ahead for piece in unit.pieces)

        def advanced(length: int) -> None:
            if self._progress is not None:
                self._progress(length, total)

        units = self._units.units
        return Conversion((shards, pack), units, self._journal, self._threads, advanced)

    def _index(self, conversion: Conversion, pack: PackSide) -> bytes:
        """Return the index with the digests of what was packed."""
        path = self._unfinished.inner / manifest.INDEX_NAME
        draft = path.read_bytes()
        if self._beginning.was_pack:
            return draft
        digests: dict[tuple[int, int], int] = {}
        for unit in self._units.units:
            noted = self._journal.digests(unit)
            assert noted is not None
            for piece, computed in zip(unit.pieces, noted, strict=True):
                digests[piece.file, piece.offset] = computed
        for piece in self._units.cut_pieces():
            parts = list(piece.cut(self._beginning.unit_length))
            known = array("Q", [digests[part.file, part.offset] for part in parts])
            if conversion.digest(parts, pack) != known:
                path = pack.paths[piece.file]
                raise MachineError("the file is not any more what was written", path=path)
            digests[piece.file, piece.offset] = pack.digest(piece)
        return with_digests(draft, digests, str(path))

    @contextmanager
    def _sides(self) -> Iterator[tuple[ShardSide, PackSide]]:
        shards = ShardSide(self._unfinished.shard_paths(len(self._maps)))
        pack = PackSide([self._unfinished.path / file.name for file in self._manifest.files])
        try:
            yield shards, pack
        finally:
            shards.close()
            pack.close()

    def _block(self) -> int:
        return holes.block_length(self._unfinished.inner)

    def _check_space_to_restore(self, count: int, pack: PackSide) -> None:
        """Check it when what was begun of the next unit is given up: it is whole in the shards."""
        if count < len(self._units.units):
            pack.truncate(self._units.units[count])
        absent = self._units.absent_length(self._block()) if self._beginning.was_pack else 0
        extent = holes.extent_length(self._unfinished.inner)
        self._check_space(self._units.room(self._block()).to_restore(count) + absent + extent)

    def _check_space(self, length: int) -> None:
        refusal = in_place_refusals.check_space(self._unfinished.path, length + self._margin)
        if refusal:
            raise refusal


def margin(units: Units, index: Index) -> int:
    """Return what is needed beside the units: journal, index and its draft, the file system."""
    return MARGIN + MARGIN_OF_PIECE * len(units.pieces) + 3 * index.header.index_length
