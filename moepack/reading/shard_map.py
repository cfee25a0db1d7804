"""Where the bytes of each shard of the source lie in a whole pack: what restoring it takes.

Parts, dense tensors and the other ranges of a shard are all of it; what lies between them is zeros.
It needs no GGUF parser: the index says where everything came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moepack.errors import PackError
from moepack.sizes import ranges_text

if TYPE_CHECKING:
    from moepack.format.index import Index
    from moepack.format.manifest import Manifest
    from moepack.format.source_entry import ShardEntry


class Described(Protocol):
    """A pack, or what describes one that is not there yet."""

    @property
    def path(self) -> Path:
        """Its directory."""

    @property
    def manifest(self) -> Manifest:
        """What it is."""

    @property
    def index(self) -> Index:
        """Where everything lies."""


@dataclass(frozen=True, slots=True)
class Description:
    """What describes a pack, whether it is open or not."""

    path: Path
    manifest: Manifest
    index: Index


class ShardPiece(NamedTuple):
    """Bytes of a shard, and where they lie in the pack.

    `shard_offset` counts from the start of the shard, `offset` from the start of file number `file`
    of the index. `digest` is None where it is not known; `label` is what a message calls them.
    `frame_length` is the bytes of the frame that they are stored in, 0 if they are stored as they
    are.
    """

    shard_offset: int
    length: int
    file: int
    offset: int
    digest: int | None
    label: str
    frame_length: int = 0

    @property
    def end(self) -> int:
        """Where they end in the shard."""
        return self.shard_offset + self.length


class ShardMap(NamedTuple):
    """One shard: its name, its length in bytes, its pieces by rising offsets; none is empty."""

    name: str
    length: int
    pieces: tuple[ShardPiece, ...]


def map_shards(pack: Described) -> tuple[ShardMap, ...]:
    """Map every shard of the source that `pack` was made from, in their order.

    Raises PackError where the pack is not whole, where two shards have one name, or where pieces
    overlap or reach past their shard.
    """
    check_whole(pack)
    entries = pack.manifest.source.shards
    pieces: list[list[ShardPiece]] = [[] for _ in entries]
    for shard, piece in _pieces(pack.index):
        if shard >= len(pieces):
            problem = "came from a shard that the manifest does not name"
            found = f"shard {shard}"
            expected = f"< {len(pieces)}"
            raise _broken(pack, piece, problem, expected, found)
        entry = entries[shard]
        if piece.end > entry.length:
            expected = f"<= {entry.length:,} bytes of {entry.name}"
            raise _broken(pack, piece, "ends past its shard", expected, f"byte {piece.end:,}")
        if piece.length:
            pieces[shard].append(piece)
    maps = []
    for entry, of_shard in zip(entries, pieces, strict=True):
        of_shard.sort(key=attrgetter("shard_offset", "length"))
        _check_header(pack, entry, of_shard)
        _check_apart(pack, entry.name, of_shard)
        maps.append(ShardMap(entry.name, entry.length, tuple(of_shard)))
    return tuple(maps)


def check_whole(pack: Described) -> None:
    """Raise PackError where a pack does not hold all of its source."""
    if pack.manifest.is_whole:
        return
    layers = pack.manifest.layers
    lacks = "the layers that were left out" if pack.index.is_whole else "the dense part"
    raise PackError(
        f"not a whole pack: it lacks {lacks}",
        path=pack.path,
        found=None if layers is None else f"layers {ranges_text(layers)}",
        hint="pack the source again, with all layers and the dense tensors",
    )


def _pieces(index: Index) -> Iterator[tuple[int, ShardPiece]]:
    """Yield each piece with the number of its shard."""
    for family in index.families:
        kinds = family.part_kinds
        for expert in range(family.expert_count):
            records = index.parts(family.first_part + expert * len(kinds), kinds)
            for kind, (offset, stored, digest, file, codec) in zip(kinds, records, strict=True):
                shard, shard_offset = index.origin(family, kind, expert)
                known = index.files[file].known(digest)
                label = f"layer {family.layer} expert {expert} {kind.name}"
                place = (shard_offset, kind.length, file, offset)
                yield shard, ShardPiece(*place, known, label, stored if codec else 0)
    for tensor in index.tensors():
        known = index.files[tensor.file].known(tensor.digest)
        label = f"tensor {tensor.name}"
        place = (tensor.shard_offset, tensor.length, tensor.file, tensor.offset)
        yield tensor.shard, ShardPiece(*place, known, label)
    for other in index.shard_bytes():
        label = "header" if not other.shard_offset else f"padding at byte {other.shard_offset:,}"
        place = (other.shard_offset, other.length, other.file, other.offset)
        yield other.shard, ShardPiece(*place, other.digest, label)


def _check_header(pack: Described, entry: ShardEntry, pieces: list[ShardPiece]) -> None:
    """Check that a shard's header is its first piece."""
    if not pieces or (pieces[0].shard_offset, pieces[0].length) != (0, entry.header_length):
        raise PackError(
            "the header of a shard is missing",
            path=pack.index.path,
            place=entry.name,
            expected=f"shard bytes 0 to {entry.header_length:,}",
        )


def _check_apart(pack: Described, name: str, pieces: list[ShardPiece]) -> None:
    """Check that the pieces of a shard do not overlap."""
    end = 0
    for piece in pieces:
        if piece.shard_offset < end:
            expected = f"byte {end:,} of {name} or later"
            raise _broken(pack, piece, "overlaps another", expected, f"byte {piece.shard_offset:,}")
        end = piece.end


def _broken(
    pack: Described, piece: ShardPiece, problem: str, expected: object, found: object
) -> PackError:
    return PackError(
        problem, path=pack.index.path, place=piece.label, expected=expected, found=found
    )
