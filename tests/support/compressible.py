"""Models with compressible experts, and packs of them."""

import struct
from pathlib import Path

import xxhash

import moepack
from tests.support.gguf_builder import F32, GgufBuilder, TensorSpec, moe, split, write_shards
from tests.support.pack_draft import Draft

SHORT, LONG = 0x0F, 0xFF
"""Masks of bytes: half of each is left, or all."""


def compressible(
    layers: tuple[int, ...] = (0, 1),
    experts: int = 4,
    ne: tuple[int, int] = (64, 64),
    masks: dict[str, int] | None = None,
) -> GgufBuilder:
    """Build a model in which a codec shortens gate and down by half, and not up.

    `masks` says otherwise by projection. A part has 4 bytes for each element of `ne`.
    """
    builder = moe(layers, experts, ne=ne, type_id=F32, block=(1, 4))
    all_masks = {"gate": SHORT, "up": LONG, "down": SHORT} | (masks or {})
    for spec in builder.tensors:
        for name, mask in all_masks.items():
            if f"ffn_{name}_exps" in spec.name:
                spec.data = bytes(byte & mask for byte in spec.data)
    return builder


def with_biases(builder: GgufBuilder, experts: int = 4, count: int = 64) -> GgufBuilder:
    """Give the experts of layer 0 biases, all zeros: small parts that a codec shortens."""
    for name in ("gate", "up", "down"):
        bias = TensorSpec(
            f"blk.0.ffn_{name}_exps.bias", (count, experts), F32, bytes(4 * count * experts)
        )
        builder.tensors.append(bias)
    return builder


def write_model(folder: Path, builder: GgufBuilder | None = None, tensors_each: int = 4) -> Path:
    """Write a model in shards into a new folder; return the first shard."""
    return write_shards(split(builder or compressible(), tensors_each), folder)[0]


def part_number(pack_path: Path, layer: int, expert: int, part: str) -> int:
    """Return the number of a part's record."""
    with moepack.open(pack_path) as pack:
        family = next(family for family in pack.index.families if family.layer == layer)
        names = [kind.name for kind in family.part_kinds]
        return family.first_part + expert * len(names) + names.index(part)


def store(pack_path: Path, number: int, stored: bytes) -> None:
    """Store other bytes for a part with a codec, and make all their digests right."""
    draft = Draft(pack_path)
    store_part(draft, number, stored)
    draft.body["index"].pop("sha256", None)
    draft.save()


def store_part(draft: Draft, number: int, stored: bytes) -> None:
    """Store a part with a codec in other bytes, with a right digest of these."""
    part = draft.get("part", number)
    assert part.codec
    draft.write(part.file, part.offset, bytes(part.stored_length))
    assert not any(draft.bytes_at(part.file, part.offset, len(stored))), "no room for it"
    draft.write(part.file, part.offset, stored)
    if len(stored) != part.stored_length:
        draft.set("part", number, stored_length=len(stored))
    section = draft.sections["stored_digests"]
    at = section.offset + number * section.record_length
    struct.pack_into("<Q", draft.index, at, xxhash.xxh3_64_intdigest(stored))
