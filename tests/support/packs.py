"""Packs for tests of what is made of them: their pieces, damage to these, and a mended manifest."""

from collections.abc import Callable, Iterator
from pathlib import Path

import moepack
from moepack.format import manifest
from moepack.format.source_entry import ShardEntry
from moepack.reading.shard_map import ShardPiece, map_shards


def pieces(pack_path: Path) -> Iterator[tuple[str, Path, ShardPiece]]:
    """Yield each piece of each shard: the shard's name, the file of the pack, and the piece."""
    with moepack.open(pack_path) as pack:
        for shard in map_shards(pack):
            for piece in shard.pieces:
                yield shard.name, pack.file_paths[piece.file], piece


def edit_shards(pack_path: Path, edit: Callable[[int, ShardEntry], ShardEntry]) -> None:
    """Change what a pack's manifest says of each shard, and sign it anew."""
    path = pack_path / manifest.NAME
    described = manifest.decode(path.read_bytes(), str(path))
    shards = tuple(edit(*both) for both in enumerate(described.source.shards))
    described = described._replace(source=described.source._replace(shards=shards))
    path.write_bytes(manifest.encode(described))


def same_bytes(paths: list[Path], folder: Path) -> bool:
    """Say whether a folder holds files of these names and bytes, and nothing else."""
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    return held == {path.name: path.read_bytes() for path in paths}
