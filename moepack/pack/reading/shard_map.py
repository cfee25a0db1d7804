"""The bytes of each shard of the source in a whole pack, for restoring and mounting.

Parts, dense tensors and the other ranges of a shard are all of it; between them are zeros. It needs
no GGUF parser: the index says where everything came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moepack.common.errors import PackError
from moepack.common.sizes import ranges_text
from moepack.storage.extents import Extent

if TYPE_CHECKING:
    from moepack.pack.format.dense import DenseTensor
    from moepack.pack.format.index import Index
    from moepack.pack.format.manifest import Manifest
    from moepack.pack.format.source_entry import ShardEntry
    from moepack.pack.format.tables import PackedFamily


class Described(Protocol):
    """A pack, or the description of one that is not open or not there yet."""

    @property
    def path(self) -> Path:
        """Its directory."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""

    @property
    def index(self) -> Index:
        """Its index."""


class ShardMap(NamedTuple):
    """One shard: its name, its length in bytes, its pieces by rising offsets; none is empty.

    The inputs of the pieces are the files of the index.
    """

    name: str
    length: int
    pieces: tuple[Extent, ...]


def map_shards(pack: Described) -> tuple[ShardMap, ...]:
    """Map every shard of the source that `pack` was made from, in their order.

    Raises PackError if the pack is not whole, if two shards have one name, or if pieces overlap or
    reach past their shard.
    """
    check_whole(pack)
    entries = pack.manifest.source.shards
    pieces: list[list[Extent]] = [[] for _ in entries]
    for shard, piece in shard_pieces(pack.index):
        if shard >= len(pieces):
            problem = "came from a shard that the manifest does not name"
            raise _broken(pack, piece, problem, f"< {len(pieces)}", f"shard {shard}")
        entry = entries[shard]
        if piece.end > entry.length:
            expected = f"<= {entry.length:,} bytes of {entry.name}"
            raise _broken(pack, piece, "ends past its shard", expected, f"byte {piece.end:,}")
        if piece.length:
            pieces[shard].append(piece)
    maps = []
    for entry, own_pieces in zip(entries, pieces, strict=True):
        own_pieces.sort(key=attrgetter("offset", "length"))
        _check_pieces(pack, entry, own_pieces)
        maps.append(ShardMap(entry.name, entry.length, tuple(own_pieces)))
    return tuple(maps)


def check_whole(pack: Described) -> None:
    """Raise PackError if a pack does not have all of its source."""
    if pack.manifest.is_whole:
        return
    layers = pack.manifest.layers
    lacks = "the layers that were left out" if pack.index.is_whole else "the dense part"
    problem = f"not a whole pack: it lacks {lacks}"
    actual = None if layers is None else f"layers {ranges_text(layers)}"
    hint = "pack the source again, with all layers and the dense tensors"
    raise PackError(problem, path=pack.path, found=actual, hint=hint)


def part_extent(
    index: Index, family: PackedFamily, expert: int, number: int, offset: int
) -> Extent:
    """Return a part in the files of the index as an extent at `offset` of a new file."""
    kind = family.part_kinds[number]
    first = family.first_part + expert * len(family.part_kinds)
    in_file, length, digest, file, _ = index.part(first + number, kind)
    label = f"layer {family.layer} expert {expert} {kind.name}"
    return Extent(offset, length, file, in_file, index.files[file].known(digest), label)


def tensor_extent(index: Index, tensor: DenseTensor, offset: int) -> Extent:
    """Return a dense tensor in the files of the index as an extent at `offset` of a new file."""
    digest = index.files[tensor.file].known(tensor.digest)
    label = f"tensor {tensor.name}"
    return Extent(offset, tensor.length, tensor.file, tensor.offset, digest, label)


def shard_pieces(index: Index) -> Iterator[tuple[int, Extent]]:
    """Yield each piece with the number of its shard."""
    for family in index.families:
        for expert in range(family.expert_count):
            for number, kind in enumerate(family.part_kinds):
                shard, offset = index.origin(family, kind, expert)
                yield shard, part_extent(index, family, expert, number, offset)
    for tensor in index.tensors():
        yield tensor.shard, tensor_extent(index, tensor, tensor.shard_offset)
    for other in index.shard_bytes():
        start = other.shard_offset
        label = f"padding at byte {start:,}" if start else "header"
        extent = Extent(start, other.length, other.file, other.offset, other.digest, label)
        yield other.shard, extent


def _check_pieces(pack: Described, entry: ShardEntry, pieces: list[Extent]) -> None:
    """Check that the first piece of a shard is its header, and that no two pieces overlap."""
    if not pieces or (pieces[0].offset, pieces[0].length) != (0, entry.header_length):
        problem, path = "the header of a shard is missing", pack.index.path
        expected = f"shard bytes 0 to {entry.header_length:,}"
        raise PackError(problem, path=path, place=entry.name, expected=expected)
    end = 0
    for piece in pieces:
        if piece.offset < end:
            expected = f"byte {end:,} of {entry.name} or later"
            raise _broken(pack, piece, "overlaps another", expected, f"byte {piece.offset:,}")
        end = piece.end


def _broken(pack: Described, piece: Extent, problem: str, expected: str, actual: str) -> PackError:
    return PackError(
        problem, path=pack.index.path, place=piece.label, expected=expected, found=actual
    )
