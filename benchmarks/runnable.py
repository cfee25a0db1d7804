"""A model that runs: Qwen3-30B-A3B's dimensions, random weights, a small real vocabulary."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moepack.source import gguf_header
from tests.support.gguf_builder import VALUE_TYPES

_VOCABULARY = Path(__file__).parent.parent / "fixtures/qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf"
_WORDS = 512
_EMBEDDING, _N_FF, _EXPERTS, _USED = 2048, 768, 128, 8
_HEADS, _KV_HEADS, _HEAD = 32, 4, 128
_SPREAD = 0.02
"""Of the weights: about that of a trained model."""
_F32, _F16, _Q4_K, _Q6_K = 0, 1, 12, 14
_ROWS = 1 << 14
_EMBEDDINGS = "token_embd.weight"
STEADY = 150.0
_ALIGNMENT = 32

Shape = tuple[int, ...]


def write_runnable(path: Path, layers: int, *, skew: float = 0.0, steadiness: float = 1.0) -> Path:
    """Write a model of `layers` layers that llama.cpp runs, 0.36 GB each and 43 MB of them dense.

    Its routers are random. With `skew` each expert's row is longer by up to that factor, so that
    some are chosen more often. With `steadiness` what a layer adds is so much less beside what it
    was given: at STEADY the router of the next layer names 83 % of what that will choose, given
    what this layer's was given, as measured of Qwen3-30B-A3B and Qwen3.6-35B (81 to 89 %).
    """
    tensors = list(_tensors(layers))
    random = np.random.Generator(np.random.SFC64(layers))
    with open(path, "wb") as file:
        file.write(_header(layers, tensors))
        for name, shape, type_id in tensors:
            for data in _data(name, shape, type_id, random, skew):
                file.write(_steadied(data, steadiness) if name == _EMBEDDINGS else data)
            file.write(bytes(-file.tell() % _ALIGNMENT))
    return path


def _tensors(layers: int) -> Iterator[tuple[str, Shape, int]]:
    yield _EMBEDDINGS, (_EMBEDDING, _WORDS), _F16
    yield "output_norm.weight", (_EMBEDDING,), _F32
    yield "output.weight", (_EMBEDDING, _WORDS), _F16
    for layer in range(layers):
        for name, shape, type_id in (
            ("attn_norm", (_EMBEDDING,), _F32),
            ("attn_q", (_EMBEDDING, _HEADS * _HEAD), _F16),
            ("attn_k", (_EMBEDDING, _KV_HEADS * _HEAD), _F16),
            ("attn_v", (_EMBEDDING, _KV_HEADS * _HEAD), _F16),
            ("attn_q_norm", (_HEAD,), _F32),
            ("attn_k_norm", (_HEAD,), _F32),
            ("attn_output", (_HEADS * _HEAD, _EMBEDDING), _F16),
            ("ffn_norm", (_EMBEDDING,), _F32),
            ("ffn_gate_inp", (_EMBEDDING, _EXPERTS), _F32),
            ("ffn_gate_exps", (_EMBEDDING, _N_FF, _EXPERTS), _Q4_K),
            ("ffn_up_exps", (_EMBEDDING, _N_FF, _EXPERTS), _Q4_K),
            ("ffn_down_exps", (_N_FF, _EMBEDDING, _EXPERTS), _Q6_K if layer % 2 else _Q4_K),
        ):
            yield f"blk.{layer}.{name}.weight", shape, type_id


def _steadied(embeddings: Any, steadiness: float) -> Any:
    """Return longer embeddings: layers are given them normed, so what they add stays as it is."""
    return (embeddings.astype(np.float32) * np.float32(steadiness)).astype(np.float16)


def _length(shape: Shape, type_id: int) -> int:
    elements, length = {_F32: (1, 4), _F16: (1, 2), _Q4_K: (256, 144), _Q6_K: (256, 210)}[type_id]
    return math.prod(shape) // elements * length


def _data(
    name: str, shape: Shape, type_id: int, random: np.random.Generator, skew: float
) -> Iterator[Any]:
    if len(shape) == 1:
        yield np.ones(shape, np.float32)
    elif type_id in (_F32, _F16):
        weights = random.standard_normal(shape[::-1], np.float32) * np.float32(_SPREAD)
        if "ffn_gate_inp" in name:
            weights *= 1 + skew * random.random((len(weights), 1), np.float32)
        yield weights.astype(np.float16 if type_id == _F16 else np.float32)
    else:
        blocks = _length(shape, type_id) // (144 if type_id == _Q4_K else 210)
        for start in range(0, blocks, _ROWS):
            count = min(_ROWS, blocks - start)
            yield (_q4_k if type_id == _Q4_K else _q6_k)(count, random)


def _q4_k(count: int, random: np.random.Generator) -> Any:
    """Make blocks of Q4_K (ggml-common.h): two scales, then 140 bytes of anything."""
    blocks = random.integers(0, 256, (count, 144), np.uint8)
    scales = np.empty((count, 2), np.float16)
    scales[:] = _SPREAD / 150, _SPREAD / 20  # minus half of what is added on average
    blocks[:, :4] = scales.view(np.uint8)
    return blocks


def _q6_k(count: int, random: np.random.Generator) -> Any:
    """Make blocks of Q6_K (ggml-common.h): 208 bytes of anything, then a scale."""
    blocks = random.integers(0, 256, (count, 210), np.uint8)
    blocks[:, 208:] = np.full((count, 1), _SPREAD / 1400, np.float16).view(np.uint8)
    return blocks


def _header(layers: int, tensors: list[tuple[str, Shape, int]]) -> bytes:
    """Return the header: the vocabulary of a model that llama.cpp's converter wrote, and sizes."""
    data = _VOCABULARY.read_bytes()
    known = gguf_header.parse(data, str(_VOCABULARY), len(data)).pairs
    kept = [data[start:end] for key, (start, end) in known.items() if key.startswith("tokenizer.")]
    kept.append(_string("general.architecture") + struct.pack("<I", 8) + _string("qwen3moe"))
    for key, kind, value in (
        ("block_count", "u32", layers),
        ("context_length", "u32", 32768),
        ("embedding_length", "u32", _EMBEDDING),
        ("feed_forward_length", "u32", 6144),
        ("attention.head_count", "u32", _HEADS),
        ("attention.head_count_kv", "u32", _KV_HEADS),
        ("attention.key_length", "u32", _HEAD),
        ("attention.value_length", "u32", _HEAD),
        ("attention.layer_norm_rms_epsilon", "f32", 1e-6),
        ("rope.freq_base", "f32", 1e6),
        ("expert_count", "u32", _EXPERTS),
        ("expert_used_count", "u32", _USED),
        ("expert_feed_forward_length", "u32", _N_FF),
    ):
        number, form = VALUE_TYPES[kind]
        kept.append(_string(f"qwen3moe.{key}") + struct.pack(f"<I{form}", number, value))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kept)) + b"".join(kept)
    offset = 0
    for name, shape, type_id in tensors:
        rank = len(shape)
        header += _string(name) + struct.pack(f"<I{rank}QIQ", rank, *shape, type_id, offset)
        length = _length(shape, type_id)
        offset += length + -length % _ALIGNMENT
    return header + bytes(-len(header) % _ALIGNMENT)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
