"""Readers of the formats of other engines, written from their descriptions alone.

Each returns the bytes of every expert by the name of its tensor and its number. They share nothing
with moepack, which writes these formats, and read everything into memory.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

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
        layer, expert, role, _, _, dtype, name = fields[:7]
        slice_offset, slice_length, offset, length, _, slice_sha256, sha256 = fields[9:16]
        scheme, transform, block = fields[20:23]
        assert (layer * experts + expert) * 3 + role == number
        assert dtype == scheme == b"MXFP4".ljust(16, b"\0")
        assert (transform.rstrip(b"\0"), block) == (b"identity-v1", 32)
        assert offset == start + (layer * experts + expert) * stride + role * length
        content = data[offset : offset + length]
        assert hashlib.sha256(content).digest() == sha256 == slice_sha256
        with open(manifest["source"]["path"], "rb") as source:
            source.seek(slice_offset)
            assert source.read(slice_length) == content
        slices[name.rstrip(b"\0").decode(), expert] = content
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


def read_anemll(path: Path) -> Slices:
    """Read the manifest of a sidecar."""
    manifest = json.loads(path.read_bytes())
    slices: Slices = {}
    for entry in manifest["entries"]:
        assert entry["tensor_name"] == f"blk.{entry['layer']}.{entry['tensor_family']}.weight"
        assert entry["expert_count"] == manifest["model"]["expert_count"]
        stride, length = entry["expert_stride"], entry["bytes_per_expert"]
        end = entry["repacked_offset"] + length
        assert stride >= end
        assert entry["exact_byte_length"] == entry["expert_count"] * length
        data = (path.parent / entry["repacked_file"]).read_bytes()
        assert len(data) >= (entry["expert_count"] - 1) * stride + end
        for expert in range(entry["expert_count"]):
            start = entry["repacked_offset"] + expert * stride
            assert (entry["tensor_name"], expert) not in slices
            slices[entry["tensor_name"], expert] = data[start : start + length]
    return slices


def read_ggmlmoepack(path: Path) -> Slices:
    """Read a GGMLMOEPACKv1."""
    data = path.read_bytes()
    magic, version, header_length, count, start = struct.unpack("<16sIIQQ", data[:40])
    assert (magic, version, header_length) == (b"GGMLMOEPACKv1\0\0\0", 1, 40)
    assert start % 4096 == 0
    assert start >= 40 + 152 * count
    slices, end = {}, start
    for number in range(count):
        entry = data[40 + number * 152 : 192 + number * 152]
        name, expert, zero, offset, length = struct.unpack("<128siIQQ", entry)
        assert zero == offset % 4096 == 0
        assert offset - end < 4096
        slices[name.rstrip(b"\0").decode(), expert] = data[offset : offset + length]
        end = offset + length
    assert end == len(data)
    assert len(slices) == count
    return slices


def read_moe_flash(path: Path) -> Slices:
    """Read a folder of experts, by scanning the manifest as its reader does."""
    text = (path / "manifest.json").read_text()
    scanned = []
    for piece in text.split('"id": ')[1:]:
        file = piece.partition('"file": "')[2].partition('"')[0]
        padded = int(piece.partition('"padded_size": ')[2].partition(",")[0])
        raw = int(piece.partition('"raw_size": ')[2].split()[0])
        assert (path / file).stat().st_size == padded >= raw
        scanned.append((int(piece.partition(",")[0]), file))
    slices, manifest = {}, json.loads(text)
    for layer in manifest["layers"]:
        for expert in layer["experts"]:
            assert scanned.pop(0) == (expert["id"], expert["file"])
            data, end = (path / expert["file"]).read_bytes(), 0
            for part in expert["parts"]:
                assert part["offset"] == end
                end += part["size"]
                name = f"blk.{layer['layer']}.ffn_{part['name']}_exps.weight"
                slices[name, expert["id"]] = data[part["offset"] : end]
            assert end == expert["raw_size"]
            assert not any(data[end:])
    return slices


READERS: dict[str, Callable[[Path, dict[str, int]], Slices]] = {
    "gguf": lambda path, _counts: read_gguf(path),
    "anemll": lambda path, _counts: read_anemll(path),
    "sglang": lambda path, _counts: read_sglang(path),
    "ggmlmoepack": lambda path, _counts: read_ggmlmoepack(path),
    "moe-stream-dir": read_moe_stream_dir,
    "moe-flash": lambda path, _counts: read_moe_flash(path),
}
"""The readers by the name of the format; each is also given the number of experts by tensor."""
