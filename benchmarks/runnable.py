"""Models that llama.cpp runs: random weights, real dimensions, a small real vocabulary."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.routing import MOST_TOKENS, Routing
from moepack.source import gguf_header
from tests.support.gguf_builder import VALUE_TYPES

FIRST_TOKEN = 4
"""The id of the first token of a routing; those before have meanings for llama.cpp."""
_VOCABULARY = Path(__file__).parent.parent / "fixtures/qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf"
_WORDS = 512
_SPREAD = 0.02
"""Of the weights: about that of a trained model."""
_LOUDNESS = 300
"""Of the embeddings of a routing: what layers add hardly changes them."""
_F32, _F16, _Q4_K, _Q6_K = 0, 1, 12, 14
_ROWS = 1 << 14
_ALIGNMENT = 32

Shape = tuple[int, ...]


class Dimensions(NamedTuple):
    """The dimensions of a model; the defaults are those of Qwen3-30B-A3B, but for its layers."""

    layers: int
    embedding: int = 2048
    n_ff: int = 768
    experts: int = 128
    used: int = 8

    @property
    def heads(self) -> tuple[int, int, int]:
        """Attention heads, those of keys and values, and the length of one."""
        return (32, 4, 128) if self.embedding >= 2048 else (8, 2, 128)


class Routers:
    """Weights by which a model says one token after the other, and routes each as it is given.

    Each token of the routing has an embedding of its own, orthogonal to all others and so long
    that layers hardly change it. A router's row for an expert is the sum of the embeddings of the
    tokens that are routed to it. The output's row for a token is the embedding of the one before,
    and for the first that of the last. So a text that begins with ids of the routing, from
    FIRST_TOKEN on, goes on with those that follow, and routes as they do, whatever came before.

    With `noise` what the router of each layer is given is multiplied by exp(noise * normal) of its
    own, and its rows by the inverse: selections stay, but what one layer is given tells less of the
    next. With an embedding of 1024 the next layer's router then names 89 % of its experts at 1.0,
    79 % at 1.2 and 48 % at 1.5; of trained models 60 to 88 % are published.
    """

    def __init__(self, routing: Routing, dimensions: Dimensions, noise: float) -> None:
        width = dimensions.embedding
        assert FIRST_TOKEN + len(routing.tokens) <= FIRST_TOKEN + MOST_TOKENS < _WORDS <= width
        self._routing, self._dimensions = routing, dimensions
        random = np.random.default_rng(1)
        directions = np.linalg.qr(random.standard_normal((width, width)))[0][:, :_WORDS]
        self._vectors = np.ascontiguousarray(directions.T * math.sqrt(width), np.float32)
        scales = random.standard_normal((dimensions.layers, width))
        self._scales = np.exp(noise * scales).astype(np.float32)

    def weights(self, name: str) -> Any:
        """Return the weights of a tensor; None where any will do."""
        *prefix, leaf, _ = name.split(".")
        layer = int(prefix[-1]) if prefix else 0
        weights = {
            "token_embd": lambda: (self._vectors * _LOUDNESS).astype(np.float16),
            "output": self._output,
            "ffn_gate_inp": lambda: self._router(layer),
            "ffn_norm": lambda: self._scales[layer],
            "attn_output": self._silence,
        }.get(leaf)
        return None if weights is None else weights()

    def _output(self) -> Any:
        rows = np.zeros_like(self._vectors)
        start, end = FIRST_TOKEN, FIRST_TOKEN + len(self._routing.tokens)
        rows[start:end] = np.roll(self._vectors[start:end], 1, axis=0) * _SPREAD
        return rows.astype(np.float16)

    def _router(self, layer: int) -> Any:
        rows = np.zeros((self._dimensions.experts, self._dimensions.embedding), np.float32)
        for token, layers in enumerate(self._routing.tokens, start=FIRST_TOKEN):
            for rank, expert in enumerate(layers[layer]):
                rows[expert] += self._vectors[token] * (1.2 - 0.05 * rank)
        return rows / self._scales[layer] * np.float32(8 / self._dimensions.embedding)

    def _silence(self) -> Any:
        heads, _, length = self._dimensions.heads
        return np.zeros((self._dimensions.embedding, heads * length), np.float16)


def write_runnable(path: Path, dimensions: Dimensions, routers: Routers | None = None) -> Path:
    """Write a model that llama.cpp runs; without `routers` its routers are random, and uniform.

    Of Qwen3-30B-A3B's dimensions a layer takes 0.36 GB, 43 MB of them dense.
    """
    tensors = list(_tensors(dimensions))
    random = np.random.Generator(np.random.SFC64(dimensions.layers))
    with open(path, "wb") as file:
        file.write(_header(dimensions, tensors))
        for name, shape, type_id in tensors:
            given = None if routers is None else routers.weights(name)
            for data in _random(shape, type_id, random) if given is None else [given]:
                file.write(data)
            file.write(bytes(-file.tell() % _ALIGNMENT))
    return path


def _tensors(dimensions: Dimensions) -> Iterator[tuple[str, Shape, int]]:
    width, n_ff, experts = dimensions.embedding, dimensions.n_ff, dimensions.experts
    heads, kv_heads, head = dimensions.heads
    yield "token_embd.weight", (width, _WORDS), _F16
    yield "output_norm.weight", (width,), _F32
    yield "output.weight", (width, _WORDS), _F16
    for layer in range(dimensions.layers):
        for name, shape, type_id in (
            ("attn_norm", (width,), _F32),
            ("attn_q", (width, heads * head), _F16),
            ("attn_k", (width, kv_heads * head), _F16),
            ("attn_v", (width, kv_heads * head), _F16),
            ("attn_q_norm", (head,), _F32),
            ("attn_k_norm", (head,), _F32),
            ("attn_output", (heads * head, width), _F16),
            ("ffn_norm", (width,), _F32),
            ("ffn_gate_inp", (width, experts), _F32),
            ("ffn_gate_exps", (width, n_ff, experts), _Q4_K),
            ("ffn_up_exps", (width, n_ff, experts), _Q4_K),
            ("ffn_down_exps", (n_ff, width, experts), _Q6_K if layer % 2 else _Q4_K),
        ):
            yield f"blk.{layer}.{name}.weight", shape, type_id


def _length(shape: Shape, type_id: int) -> int:
    elements, length = {_F32: (1, 4), _F16: (1, 2), _Q4_K: (256, 144), _Q6_K: (256, 210)}[type_id]
    return math.prod(shape) // elements * length


def _random(shape: Shape, type_id: int, random: np.random.Generator) -> Iterator[Any]:
    if len(shape) == 1:
        yield np.ones(shape, np.float32)
    elif type_id in (_F32, _F16):
        weights = random.standard_normal(shape[::-1], np.float32) * np.float32(_SPREAD)
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


def _header(dimensions: Dimensions, tensors: list[tuple[str, Shape, int]]) -> bytes:
    """Return the header: the vocabulary of a model that llama.cpp's converter wrote, and sizes."""
    data = _VOCABULARY.read_bytes()
    known = gguf_header.parse(data, str(_VOCABULARY), len(data)).pairs
    kept = [data[start:end] for key, (start, end) in known.items() if key.startswith("tokenizer.")]
    heads, kv_heads, head = dimensions.heads
    kept.append(_string("general.architecture") + struct.pack("<I", 8) + _string("qwen3moe"))
    for key, kind, value in (
        ("block_count", "u32", dimensions.layers),
        ("context_length", "u32", 32768),
        ("embedding_length", "u32", dimensions.embedding),
        ("feed_forward_length", "u32", 3 * dimensions.embedding),
        ("attention.head_count", "u32", heads),
        ("attention.head_count_kv", "u32", kv_heads),
        ("attention.key_length", "u32", head),
        ("attention.value_length", "u32", head),
        ("attention.layer_norm_rms_epsilon", "f32", 1e-6),
        ("rope.freq_base", "f32", 1e6),
        ("expert_count", "u32", dimensions.experts),
        ("expert_used_count", "u32", dimensions.used),
        ("expert_feed_forward_length", "u32", dimensions.n_ff),
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
