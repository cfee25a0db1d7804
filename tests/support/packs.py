"""Packs for tests: odd ones, their pieces, damage to these, a mended manifest, and mirrors."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import moepack
from moepack.pack.format import manifest
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.reading.shard_map import map_shards
from moepack.storage.extents import Extent
from tests.support.gguf_builder import Q8_0, moe
from tests.support.models import hotness_of

FINE_LAYOUT = """
description = "aligned to less than any drive asks for"
[files]
group = "layer"
name = "experts-{layer}.bin"
[blobs]
order = "source"
alignment = 64
[parts]
projections = ["gate_up", "gate", "up", "down", "attn_v"]
alignment = 64
small_alignment = 64
[dense]
alignment = 64
"""


def families_model(folder: Path) -> Path:
    """Write a model with three families in layer 0."""
    builder = moe((0, 3), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    return builder.write(folder / "m.gguf")


def pieces(pack_path: Path) -> Iterator[tuple[str, Path, Extent]]:
    """Yield each piece of each shard: the shard's name, the file of the pack, and the piece."""
    with moepack.open(pack_path) as pack:
        for shard in map_shards(pack):
            for piece in shard.pieces:
                yield shard.name, pack.file_paths[piece.input], piece


def ranked_meanwhile(pack_path: Path, target: Path) -> Path:
    """Copy a pack, with its next ranking beside it, as rank_meanwhile.c completes that."""
    shutil.copytree(pack_path, target)
    shutil.copytree(pack_path, target / "ranked")
    with moepack.open(pack_path) as pack:
        counts = {(layer, expert): expert for layer in pack.layers for expert in range(2)}
    name = moepack.rank_pack(target / "ranked", hotness_of(counts)).index_name
    (target / "ranked" / name).rename(target / name)
    (target / "ranked" / manifest.NAME).rename(target / "manifest.new")
    shutil.rmtree(target / "ranked")
    return target


def edit_shards(pack_path: Path, edit: Callable[[int, ShardEntry], ShardEntry]) -> None:
    """Change the shards in a pack's manifest, and sign it anew."""
    path = pack_path / manifest.NAME
    described = manifest.decode(path.read_bytes(), str(path))
    shards = tuple(edit(*both) for both in enumerate(described.source.shards))
    described = described._replace(source=described.source._replace(shards=shards))
    path.write_bytes(manifest.encode(described))


def same_bytes(paths: list[Path], folder: Path) -> bool:
    """Return whether a folder has files of these names and bytes, and nothing else."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files == {path.name: path.read_bytes() for path in paths}


def mirror(pack: Path, *, hottest: int | None = None) -> Path:
    """Mirror a pack in a folder beside it; return the folder with the copies."""
    target = pack.parent / "second drive"
    target.mkdir(exist_ok=True)
    return Path(moepack.mirror_pack(pack, target, hottest=hottest).path)
