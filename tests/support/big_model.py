"""A model of 864 MiB that llama.cpp runs, and that takes a fiftieth of that on disk.

Most of its experts' weights are holes, so zeros: only what each part begins with is written.
"""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tests.support.models import first_shard

LAYERS, EXPERTS = 12, 32
LENGTH = LAYERS * EXPERTS * 3 * 512 * 768 * 2
"""The bytes of its experts."""
_WIDTH, _N_FF, _USED, _HEADS, _HEAD = 512, 768, 4, 4, 64
_WRITTEN = 8192
"""How many weights of each expert's matrix are not zero."""
_ALIGNMENT = 32
_ARCHITECTURE = "qwen3moe"


def write_big_model(path: Path) -> Path:
    """Write the model."""
    vocabulary = GGUFReader(first_shard("qwen3moe")).fields
    words = len(vocabulary["tokenizer.ggml.tokens"].data)
    writer = GGUFWriter(path, _ARCHITECTURE)
    for key, field in vocabulary.items():
        if key.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in _sizes().items():
        writer.add_uint32(f"{_ARCHITECTURE}.{key}", value)
    writer.add_float32(f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon", 1e-6)
    tensors = _tensors(words)
    for name, shape in tensors.items():
        kind = _kind(name, shape)
        writer.add_tensor_info(name, shape, kind, _length(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _write_weights(path, tensors)
    return path


def _sizes() -> dict[str, int]:
    return {
        **{"block_count": LAYERS, "context_length": 4096, "embedding_length": _WIDTH},
        **{"feed_forward_length": _N_FF, "expert_feed_forward_length": _N_FF},
        **{"expert_count": EXPERTS, "expert_used_count": _USED},
        **{"attention.head_count": _HEADS, "attention.head_count_kv": _HEADS},
        **{"attention.key_length": _HEAD, "attention.value_length": _HEAD},
    }


def _tensors(words: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, rows last."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd": (words, _WIDTH), "output_norm": (_WIDTH,)}
    tensors["output"] = words, _WIDTH
    heads = _HEADS * _HEAD
    for layer in range(LAYERS):
        for name, shape in {
            **{"attn_norm": (_WIDTH,), "ffn_norm": (_WIDTH,)},
            **{"attn_q_norm": (_HEAD,), "attn_k_norm": (_HEAD,)},
            **{f"attn_{name}": (heads, _WIDTH) for name in "qkv"},
            "attn_output": (_WIDTH, heads),
            "ffn_gate_inp": (EXPERTS, _WIDTH),
            "ffn_gate_exps": (EXPERTS, _N_FF, _WIDTH),
            "ffn_up_exps": (EXPERTS, _N_FF, _WIDTH),
            "ffn_down_exps": (EXPERTS, _WIDTH, _N_FF),
        }.items():
            tensors[f"blk.{layer}.{name}"] = shape
    return {f"{name}.weight": shape for name, shape in tensors.items()}


def _kind(name: str, shape: tuple[int, ...]) -> Any:
    is_single = len(shape) == 1 or "gate_inp" in name
    return np.dtype(np.float32 if is_single else np.float16)


def _length(name: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * int(_kind(name, shape).itemsize)


def _write_weights(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    random = np.random.Generator(np.random.SFC64(1))
    lengths = [-(-_length(*tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.items()]
    with open(path, "r+b") as file:
        start = -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT
        ends = accumulate(lengths, initial=start)
        for (name, shape), (offset, end) in zip(tensors.items(), pairwise(ends), strict=True):
            kind = _kind(name, shape)
            pieces = shape[0] if "exps" in name else 1
            for piece in range(pieces):
                count = _WRITTEN if pieces > 1 else int(np.prod(shape))
                weights = random.standard_normal(count, np.float32) / np.sqrt(shape[-1])
                weights = weights if len(shape) > 1 else np.ones(count, np.float32)
                file.seek(offset + piece * (_length(name, shape) // pieces))
                file.write(weights.astype(kind).tobytes())
            file.truncate(max(end, path.stat().st_size))
