"""Models for the benchmarks: true dimensions and random bytes, or just many of something."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import moepack
from tests.support.gguf_builder import GgufBuilder, TensorSpec, moe, shard_names
from tests.support.packs import FINE_LAYOUT

EXPERTS, USED = 128, 8
NE0, N_FF = 2048, 768
"""Of Qwen3-30B-A3B, whose Q4_K_M has Q6_K in the down projection of half its layers."""

VOCABULARY = 250_000
MANY_LAYERS, MANY_EXPERTS = 60, 512
"""Of Qwen3.5-397B-A17B: 30,720 blobs."""


class BlobSize(NamedTuple):
    """Experts of three matrices of 1024 x `n_ff` 16-bit numbers: blobs without any padding."""

    n_ff: int

    @property
    def length(self) -> int:
        """The bytes of one blob."""
        return 3 * 1024 * self.n_ff * 2


SMALL, MIDDLE, LARGE = BLOBS = BlobSize(42), BlobSize(170), BlobSize(682)
"""252, 1020 and 4092 KiB: whole pages that are next to 256 KiB, 1 MiB and 4 MiB."""

_PIECE = 4 << 20
_MAX_WORD = (1 << 64) - 1
_Q4_K, _Q6_K, _F32, _F16 = (12, 256, 144), (14, 256, 210), (0, 1, 4), (1, 1, 2)


def write_model(folder: Path, layers: int, shard_count: int = 4) -> list[Path]:
    """Write a Qwen3-30B-A3B of `layers` layers in several shards, and hardly any dense weights."""
    tensors = list(_tensors(layers))
    size = math.ceil(len(tensors) / shard_count)
    groups = [tensors[start : start + size] for start in range(0, len(tensors), size)]
    random = np.random.Generator(np.random.SFC64(layers))
    paths = [folder / name for name in shard_names("model", len(groups))]
    for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
        builder = metadata(layers, EXPERTS) if number == 0 else GgufBuilder()
        builder.put("split.no", "u16", number).put("split.count", "u16", len(groups))
        builder.put("split.tensors.count", "i32", len(tensors))
        _write_shard(path, builder, group, random)
    return paths


def write_hotness(path: Path, layers: int) -> Path:
    """Write a hotness file that shuffles the experts of all layers."""
    random = np.random.Generator(np.random.SFC64(1))
    counts = iter(random.integers(0, 1 << 20, layers * EXPERTS))
    pairs = itertools.product(range(layers), range(EXPERTS))
    lines = [f"{layer},{expert},{next(counts)}\n" for layer, expert in pairs]
    path.write_text("layer,expert,count\n" + "".join(lines))
    return path


def write_vocabulary(path: Path) -> Path:
    """Write a tiny model with a huge vocabulary: tokens, scores, types and merges."""
    builder = moe(layers=(0,), experts=4)
    tokens = [f"token{number}" for number in range(VOCABULARY)]
    builder.put("tokenizer.ggml.tokens", "arr:str", tokens)
    builder.put("tokenizer.ggml.scores", "arr:f32", [0.5] * VOCABULARY)
    builder.put("tokenizer.ggml.token_type", "arr:i32", [1] * VOCABULARY)
    merges = [f"to ken{number}" for number in range(VOCABULARY)]
    builder.put("tokenizer.ggml.merges", "arr:str", merges)
    return builder.write(path)


def write_many(folder: Path) -> tuple[Path, Path]:
    """Write a model of very many very small experts; give it and a layout that suits it."""
    layout = folder / "tiny.toml"
    layout.write_text(FINE_LAYOUT)
    builder = moe(
        layers=tuple(range(MANY_LAYERS)), experts=MANY_EXPERTS, ne=(32, 32), block=(32, 34)
    )
    return builder.write(folder / "many.gguf"), layout


def write_blobs(folder: Path, size: BlobSize, length: int) -> Path:
    """Write a pack of one layer of blobs of one size, `length` bytes or a little less."""
    count = length // size.length
    pack = folder / f"blobs-{size.n_ff}-{count}"
    if pack.exists():
        return pack
    source = folder / f"{pack.name}.gguf"
    builder = metadata(1, count)
    shapes = {"gate": (1024, size.n_ff), "up": (1024, size.n_ff), "down": (size.n_ff, 1024)}
    tensors = [
        (f"blk.0.ffn_{name}_exps.weight", (*shape, count), _F16) for name, shape in shapes.items()
    ]
    _write_shard(source, builder, tensors, np.random.Generator(np.random.SFC64(count)))
    moepack.pack_model(source, pack)
    source.unlink()
    return pack


def _tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int, int]]]:
    """Yield (name, dimensions, (type, elements in a block, bytes in a block))."""
    for layer in range(layers):
        yield f"blk.{layer}.attn_norm.weight", (NE0,), _F32
        yield f"blk.{layer}.ffn_gate_exps.weight", (NE0, N_FF, EXPERTS), _Q4_K
        yield f"blk.{layer}.ffn_up_exps.weight", (NE0, N_FF, EXPERTS), _Q4_K
        down = _Q6_K if layer % 2 else _Q4_K
        yield f"blk.{layer}.ffn_down_exps.weight", (N_FF, NE0, EXPERTS), down


def metadata(layers: int, experts: int) -> GgufBuilder:
    """Begin a model of so many layers and experts, of which a token uses eight."""
    builder = GgufBuilder().put("general.architecture", "str", "qwen3moe")
    builder.put("qwen3moe.block_count", "u32", layers)
    builder.put("qwen3moe.expert_count", "u32", experts)
    return builder.put("qwen3moe.expert_used_count", "u32", USED)


def _write_shard(
    path: Path,
    builder: GgufBuilder,
    tensors: Sequence[tuple[str, tuple[int, ...], tuple[int, int, int]]],
    random: np.random.Generator,
) -> None:
    """Write one shard; all lengths are multiples of the alignment, so that nothing is padded."""
    total = 0
    for name, dims, (type_id, elements, length) in tensors:
        builder.tensors.append(TensorSpec(name, dims, type_id, b"", offset=total))
        total += math.prod(dims) // elements * length
    with open(path, "wb") as file:
        file.write(builder.header())
        while total:
            length = min(total, _PIECE)
            file.write(random.integers(0, _MAX_WORD, length // 8, np.uint64, endpoint=True).data)
            total -= length
