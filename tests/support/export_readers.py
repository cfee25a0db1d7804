"""Readers of the formats of other engines, written from their descriptions alone.

Each returns the bytes of every expert by the name of its tensor and its number. They share nothing
with moepack, which writes these formats, and read everything into memory.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gguf import GGUFReader

Slices = dict[tuple[str, int], bytes]


def read_gguf(path: Path) -> Slices:
    """Read a GGUF, by gguf-py."""
    slices: Slices = {}
    for tensor in GGUFReader(path).tensors:
        if "_exps.weight" in tensor.name:
            data, count = tensor.data.tobytes(), int(tensor.shape[-1])
            size = len(data) // count
            for expert in range(count):
                slices[tensor.name, expert] = data[expert * size : (expert + 1) * size]
    return slices


class SglangEntry(NamedTuple):
    """An entry of the index of SGLANG-EXPERTPACK-v1, in the order of its fields."""

    layer: int
    expert: int
    role: int
    rank: int
    dtype_id: int
    dtype: bytes
    tensor_name: bytes
    tensor_offset: int
    tensor_length: int
    slice_offset: int
    slice_length: int
    offset: int
    length: int
    tensor_sha256: bytes
    slice_sha256: bytes
    sha256: bytes
    ne0: int
    ne1: int
    ne2: int
    ne3: int
    scheme: bytes
    transform: bytes
    block_size: int
    generation: int


def read_sglang(path: Path) -> Slices:
    """Read a folder with an expert pack of SGLang, and check what its own reader checks."""
    data = (path / "DeepSeek-V4-Flash.expert-pack").read_bytes()
    header = struct.unpack("<24sIIIIQQQIIII32s32s32s", data[:176])
    assert header[:5] == (b"SGLANG-EXPERTPACK-v1" + bytes(4), 1, 176, 328, 3)
    count, start, alignment, layers, experts, top_k, roles = header[5:12]
    assert (count, roles) == (layers * experts * 3, 3)
    assert start % alignment == 0
    assert top_k >= 1
    manifest = json.loads((path / "DeepSeek-V4-Flash.expert-pack.manifest.json").read_bytes())
    stride = manifest["object_stride"]
    assert len(data) == start + layers * experts * stride == manifest["pack_size"]
    assert hashlib.sha256(data).hexdigest() == manifest["pack_sha256"]
    slices: Slices = {}
    for number in range(count):
        at = 176 + number * 328
        fields = struct.unpack("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ", data[at : at + 328])
        entry = SglangEntry(*fields)
        assert (entry.layer * experts + entry.expert) * 3 + entry.role == number
        assert entry.dtype == entry.scheme == b"MXFP4".ljust(16, b"\0")
        assert (entry.transform.rstrip(b"\0"), entry.block_size) == (b"identity-v1", 32)
        place = start + (entry.layer * experts + entry.expert) * stride
        assert entry.offset == place + entry.role * entry.length
        content = data[entry.offset : entry.offset + entry.length]
        assert hashlib.sha256(content).digest() == entry.sha256 == entry.slice_sha256
        gguf = Path(manifest["source"]["path"])
        with open(gguf, "rb") as source:
            source.seek(entry.slice_offset)
            assert source.read(entry.slice_length) == content
        slices[entry.tensor_name.rstrip(b"\0").decode(), entry.expert] = content
    return slices


def read_moe_stream_dir(path: Path, counts: dict[str, int]) -> Slices:
    """Read a folder of expert tensors; their numbers of experts are in the GGUF."""
    slices: Slices = {}
    for name, count in counts.items():
        _, layer, part, _ = name.split(".")
        file = path / f"layer_{int(layer):02d}.{part.split('_')[1]}.bin"
        data = file.read_bytes()
        size = len(data) // count
        assert size * count == len(data)
        for expert in range(count):
            slices[name, expert] = data[expert * size : (expert + 1) * size]
    return slices


READERS: dict[str, Callable[[Path, dict[str, int]], Slices]] = {
    "gguf": lambda path, _counts: read_gguf(path),
    "sglang": lambda path, _counts: read_sglang(path),
    "moe-stream-dir": read_moe_stream_dir,
}
"""The readers by the name of the format; each is also given the number of experts by tensor."""
