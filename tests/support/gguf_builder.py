"""Build GGUF files for tests: sound by default, or with exactly the fault that a test asks for.

This writer shares nothing with moepack. Sizes come from an explicit number of bytes for a row, so
that types exist here that no table knows.
"""

import hashlib
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VALUE_TYPES = {
    **{"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I")},
    **{"i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q")},
    "f64": (12, "d"),
}
F32 = 0
Q8_0 = 8


@dataclass
class TensorSpec:
    """A tensor to write; `offset` and `entry` overrule what the table would say of it.

    `hole` is bytes that are in the file and not here, for `write_sparse`.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None
    count_of_dims: int | None = None
    hole: int = 0


@dataclass
class GgufBuilder:
    """One GGUF file to be; every field may be set to what no sound file has."""

    metadata: list[tuple[str, str, Any]] = field(default_factory=list)
    tensors: list[TensorSpec] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    tensor_count: int | None = None
    pair_count: int | None = None
    trailing: bytes = b""
    padding: int = 0
    """What each byte of padding behind the header and behind tensors is."""

    def put(self, key: str, type_name: str, value: Any) -> "GgufBuilder":
        """Add a metadata value, in place of one with the same key."""
        self.metadata = [pair for pair in self.metadata if pair[0] != key]
        self.metadata.append((key, type_name, value))
        return self

    def tensor(
        self, name: str, dims: tuple[int, ...], type_id: int, row_length: int, tail: int = 0
    ) -> "GgufBuilder":
        """Add a tensor of rows of `row_length` bytes; its bytes follow from its name."""
        length = row_length * math.prod(dims[1:]) + tail
        self.tensors.append(TensorSpec(name, dims, type_id, filler(name, length)))
        return self

    def header(self) -> bytes:
        out = bytearray(self.magic + struct.pack("<I", self.version))
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        pair_count = len(self.metadata) if self.pair_count is None else self.pair_count
        out += struct.pack("<QQ", tensor_count, pair_count)
        for key, type_name, value in self.metadata:
            out += _string(key) + _value(type_name, value)
        offset = 0
        for spec in self.tensors:
            count = len(spec.dims) if spec.count_of_dims is None else spec.count_of_dims
            out += _string(spec.name) + struct.pack("<I", count)
            out += struct.pack(f"<{len(spec.dims)}Q", *spec.dims)
            placed = offset if spec.offset is None else spec.offset
            out += struct.pack("<IQ", spec.type_id, placed)
            offset += _padded(len(spec.data) + spec.hole, self.alignment)
        if self.tensors:
            out += self.pad(len(out))
        return bytes(out)

    def pad(self, length: int) -> bytes:
        return bytes([self.padding]) * (_padded(length, self.alignment) - length)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path

    def write_sparse(self, path: Path) -> Path:
        """Write a file with holes for the bytes that are not here."""
        with open(path, "wb") as file:
            file.write(self.header())
            for spec in self.tensors:
                file.write(spec.data)
                length = len(spec.data)
                file.seek(_padded(length + spec.hole, self.alignment) - length, os.SEEK_CUR)
            file.truncate()
        return path

    def bytes(self) -> bytes:
        out = bytearray(self.header())
        for spec in self.tensors:
            out += spec.data + self.pad(len(spec.data))
        return bytes(out) + self.trailing


def kind_of(value: Any) -> str:
    """Return the type that llama.cpp's converter gives a number, or a list of numbers."""
    if isinstance(value, list):
        return f"arr:{kind_of(value[0])}"
    return {bool: "bool", int: "u32", float: "f32"}[type(value)]


def filler(name: str, length: int) -> bytes:
    """Return `length` bytes that differ from place to place and from name to name."""
    return hashlib.shake_128(name.encode()).digest(length)


def moe(
    layers: tuple[int, ...] = (0, 1, 2),
    experts: int = 4,
    *,
    architecture: str = "qwen3moe",
    ne: tuple[int, int] = (64, 32),
    type_id: int = Q8_0,
    block: tuple[int, int] = (32, 34),
    row_meta: int = 0,
    block_count: int | None = None,
) -> GgufBuilder:
    """Build a small MoE model: gate, up, down of `experts` experts in `layers`, and dense ones."""
    blocks = max(layers, default=-1) + 1 if block_count is None else block_count
    builder = GgufBuilder()
    builder.put("general.architecture", "str", architecture)
    builder.put("general.name", "str", "Built for a test")
    builder.put(f"{architecture}.block_count", "u32", blocks)
    builder.put(f"{architecture}.expert_count", "u32", experts)
    builder.put(f"{architecture}.expert_used_count", "u32", 2)
    builder.tensor("token_embd.weight", (ne[0], 8), F32, 4 * ne[0])
    for layer in range(blocks):
        builder.tensor(f"blk.{layer}.attn_norm.weight", (ne[0],), F32, 4 * ne[0])
        if layer in layers:
            add_experts(builder, layer, experts, ne, type_id, block, row_meta)
    return builder.tensor("output_norm.weight", (ne[0],), F32, 4 * ne[0])


def add_experts(
    builder: GgufBuilder,
    layer: int,
    experts: int,
    ne: tuple[int, int],
    type_id: int,
    block: tuple[int, int],
    row_meta: int = 0,
    projections: tuple[str, ...] = ("gate", "up", "down"),
) -> None:
    for name in projections:
        ne0, ne1 = ne[::-1] if name == "down" else ne
        row_length = row_meta + ne0 // block[0] * block[1]
        dims = (ne0, ne1 * (2 if name == "gate_up" else 1), experts)
        builder.tensor(f"blk.{layer}.ffn_{name}_exps.weight", dims, type_id, row_length)


def split(builder: GgufBuilder, tensors_each: int) -> list[GgufBuilder]:
    """Split a model as llama-gguf-split does: all keys in the first shard, three in the others."""
    groups = [
        builder.tensors[start : start + tensors_each]
        for start in range(0, len(builder.tensors), tensors_each)
    ]
    shards = []
    for number, group in enumerate(groups):
        shard = GgufBuilder(tensors=group, alignment=builder.alignment, padding=builder.padding)
        shard.metadata = list(builder.metadata) if number == 0 else []
        shard.put("split.no", "u16", number)
        shard.put("split.count", "u16", len(groups))
        shard.put("split.tensors.count", "i32", len(builder.tensors))
        shards.append(shard)
    return shards


def write_shards(shards: list[GgufBuilder], folder: Path, prefix: str = "model") -> list[Path]:
    """Write shards into a folder, which is made where there is none; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = shard_names(prefix, len(shards))
    return [shard.write(folder / name) for shard, name in zip(shards, names, strict=True)]


def shard_names(prefix: str, count: int) -> Iterator[str]:
    return (f"{prefix}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(type_name: str, value: Any) -> bytes:
    if type_name == "raw":
        return bytes(value)
    if type_name == "str":
        return struct.pack("<I", 8) + _string(value)
    if type_name.startswith("arr:"):
        return struct.pack("<I", 9) + _array(type_name[4:], value)
    type_id, form = VALUE_TYPES[type_name]
    return struct.pack("<I" + form, type_id, value)


def _array(type_name: str, values: Any) -> bytes:
    if type_name == "str":
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(_string, values))
    type_id, form = VALUE_TYPES[type_name]
    return struct.pack("<IQ", type_id, len(values)) + struct.pack(f"<{len(values)}{form}", *values)


def _padded(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
