"""Models of real dimensions, of which only the header is there: their tensors are one hole.

Dimensions are those of the published models, or near them: two answers for the same file are
compared. Keys are called as llama.cpp's converter calls them. Which tensors a model has, and of
which shapes, llama.cpp b11549 says itself.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from tests.support import llama_cpp, llama_cpp_memory
from tests.support.gguf_builder import GgufBuilder, TensorSpec, kind_of
from tests.support.needs import require_llama

Pairs = dict[str, Any]

_F32, _F16, _Q8_0, _Q5_0, _Q4_K, _MXFP4 = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.MXFP4,
)
_EXPERTS = re.compile(r"_(ch)?exps\.weight$")
_UNUSED = re.compile(r"scale$")
"""What only some quantisations have (but gemma4 has scales that belong to the model)."""
_SMALL = re.compile(r"norm|bias|ffn_gate_inp|ssm_|indexer|conv|exp_probs|altup|laurel")
_MLA: Pairs = {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
}


def _ssm(kernel: int, state: int, groups: int, rank: int, inner: int) -> Pairs:
    return {
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": rank,
        "ssm.inner_size": inner,
    }


_DELTA_NET: Pairs = {
    "attention.head_count": 16,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "full_attention_interval": 4,
    **_ssm(4, 128, 16, 32, 4096),
}


def _heads(count: int, kv_count: int | list[int], length: int, window: int | None = None) -> Pairs:
    windows = {} if window is None else {"attention.sliding_window": window}
    return windows | {
        "attention.head_count": count,
        "attention.head_count_kv": kv_count,
        "attention.key_length": length,
        "attention.value_length": length,
        "rope.dimension_count": length,
    }


def _sizes(blocks: int, width: int, ff: int, vocabulary: int, context: int) -> Pairs:
    return {
        "block_count": blocks,
        "embedding_length": width,
        "feed_forward_length": ff,
        "vocab_size": vocabulary,
        "context_length": context,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def _experts(count: int, used: int, ff: int, shared_ff: int = 0, dense: int = 0) -> Pairs:
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": ff,
        "expert_shared_count": 1 if shared_ff else 0,
        "expert_shared_feed_forward_length": shared_ff,
        "leading_dense_block_count": dense,
        "expert_gating_func": 2,
    }


def _at(count: int, layers: tuple[int, ...], value: int, other: int = 0) -> list[int]:
    return [value if layer in layers else other for layer in range(count)]


_GLM_5: Pairs = (
    _sizes(79, 6144, 12288, 154880, 202752)
    | _MLA
    | _experts(256, 8, 2048, 2048, 3)
    | {
        "nextn_predict_layers": 1,
        "attention.head_count": 64,
        "attention.q_lora_rank": 2048,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "attention.indexer.head_count": 32,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
    }
)
_HYBRID = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # of Nemotron 3 Nano, as published

MODELS: Mapping[str, tuple[str, Pairs]] = {
    "gpt-oss-120b": (
        "gpt-oss",
        _sizes(36, 2880, 2880, 201088, 131072)
        | _heads(64, 8, 64, window=128)
        | _experts(128, 4, 2880),
    ),
    "Qwen3-30B-A3B": (
        "qwen3moe",
        _sizes(48, 2048, 6144, 151936, 40960) | _heads(32, 4, 128) | _experts(128, 8, 768),
    ),
    "Mixtral-8x7B": (
        "llama",
        _sizes(32, 4096, 14336, 32000, 32768)
        | _heads(32, 8, 128)
        | {"expert_count": 8, "expert_used_count": 2},
    ),
    "DeepSeek-V3": (
        "deepseek2",
        _sizes(61, 7168, 18432, 129280, 163840)
        | _MLA
        | _experts(256, 8, 2048, 2048, 3)
        | {
            "attention.head_count": 128,
            "attention.q_lora_rank": 1536,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
    ),
    "GLM-5": ("glm-dsa", _GLM_5),
    "GLM-5.2": ("glm-dsa", _GLM_5 | {"context_length": 1 << 20}),
    "GLM-4.5-Air": (
        "glm4moe",
        _sizes(47, 4096, 10944, 151552, 131072)
        | _heads(96, 8, 128)
        | _experts(128, 8, 1408, 1408, 1)
        | {"nextn_predict_layers": 1},
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3next",
        _sizes(48, 2048, 5120, 151936, 262144) | _DELTA_NET | _experts(512, 10, 512, 512),
    ),
    "Qwen3.5-35B-A3B": (
        "qwen35moe",
        _sizes(41, 2048, 5120, 248320, 262144)
        | _DELTA_NET
        | _experts(256, 8, 512, 512)
        | {"nextn_predict_layers": 1},
    ),
    "Granite-4.0-H-Small": (
        "granitehybrid",
        _sizes(40, 4096, 768, 100352, 131072)
        | _heads(32, _at(40, (5, 15, 25, 35), 8), 128)
        | {
            "expert_count": 72,
            "expert_used_count": 10,
            "expert_shared_feed_forward_length": 1536,
            **_ssm(4, 128, 1, 128, 8192),
        },
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h_moe",
        _sizes(52, 2688, 0, 131072, 262144)
        | _heads(32, [2 if kind == "*" else 0 for kind in _HYBRID], 128)
        | _experts(128, 6, 1856, 3712)
        | {
            "feed_forward_length": [1856 if kind == "E" else 0 for kind in _HYBRID],
            **_ssm(4, 128, 8, 64, 4096),
        },
    ),
    "LFM2-8B-A1B": (
        "lfm2moe",
        _sizes(24, 2048, 7168, 65536, 128000)
        | _heads(32, _at(24, (2, 6, 10, 14, 18, 21), 8), 64)
        | _experts(32, 4, 1792, 0, 2)
        | {"shortconv.l_cache": 3},
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi-linear",
        _sizes(27, 2304, 9216, 163840, 1048576)
        | _MLA
        | _experts(256, 8, 1024, 1024, 1)
        | {
            "attention.head_count": 32,
            "attention.head_count_kv": _at(27, (3, 7, 11, 15, 19, 23, 26), 1),
            "kda.head_dim": 128,
            "ssm.conv_kernel": 4,
        },
    ),
    "Llama-4-Scout": (
        "llama4",
        _sizes(48, 5120, 16384, 202048, 10485760)
        | _heads(40, 8, 128)
        | _experts(16, 1, 8192)
        | {"interleave_moe_layer_step": 1},
    ),
    "Gemma-4-26B-A4B": (
        "gemma4",
        _sizes(30, 2816, 2112, 262144, 262144)
        | _heads(16, [2 if layer % 6 == 5 else 8 for layer in range(30)], 512)
        | _experts(128, 8, 704)
        | {
            "embedding_length_per_layer_input": 0,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "attention.sliding_window": 1024,
            "attention.sliding_window_pattern": [layer % 6 != 5 for layer in range(30)],
            "attention.shared_kv_layers": 0,
            "rope.dimension_count_swa": 256,
        },
    ),
    "MiMo-V2-Flash": (
        "mimo2",
        _sizes(48, 4096, 16384, 152576, 262144)
        | _heads(64, _at(48, (0, 5, 11, 17, 23, 29, 35, 41, 47), 4, 8), 192)
        | _experts(256, 8, 2048)
        | {
            "attention.value_length": 128,
            "attention.sliding_window": 128,
            "attention.sliding_window_pattern": _at(48, (0, 5, 11, 17, 23, 29, 35, 41, 47), 0, 1),
            "rope.dimension_count": 64,
        },
    ),
    "MiniMax-M2": (
        "minimax-m2",
        _sizes(62, 3072, 1536, 200064, 196608) | _heads(48, 8, 128) | _experts(256, 8, 1536),
    ),
}
"""By what a test calls them: the architecture, and metadata without its name in the keys."""


def write(name: str, path: Path, without: str = "^$") -> Path:
    """Write one of the models to `path`, as a file with a hole where its tensors are.

    It has no tensors whose names match `without`. llama.cpp is asked for their names: where there
    is none, the test is skipped.
    """
    require_llama()
    architecture, pairs = MODELS[name]
    builder = GgufBuilder().put("general.architecture", "str", architecture)
    builder.put("general.name", "str", name)
    for key, value in pairs.items():
        builder.put(f"{architecture}.{key}", kind_of(value), value)
    builder.put("tokenizer.ggml.model", "str", "no_vocab")
    shapes = llama_cpp_memory.wanted_tensors(builder.write(path))
    for tensor, shape in shapes.items():
        has_scales = architecture == "gemma4" and "input" not in tensor
        if re.search(without, tensor) or (_UNUSED.search(tensor) and not has_scales):
            continue
        kind = int(_type(architecture, tensor, shape))
        length = llama_cpp.row_size(kind, shape[0]) * math.prod(shape[1:])
        builder.tensors.append(TensorSpec(tensor, shape, kind, b"", hole=length))
    return builder.write_sparse(path)


def write_plain(path: Path, layers: int, experts: int, used: int, length: int, dense: int) -> Path:
    """Write a model by the bytes of an expert's projection and of all that is dense."""
    builder = GgufBuilder().put("general.architecture", "str", "qwen3moe")
    numbers = {"block_count": layers, "expert_count": experts, "expert_used_count": used}
    numbers |= {"embedding_length": 32, "feed_forward_length": 32, "context_length": 4096}
    numbers |= {"attention.head_count": 1, "attention.head_count_kv": 1}
    for key, value in numbers.items():
        builder.put(f"qwen3moe.{key}", "u32", value)
    tensors: dict[str, tuple[int, ...]] = {"output_norm.weight": (dense,)}
    for layer in range(layers):
        for name in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = (length, 1, experts)
    for name, dims in tensors.items():
        builder.tensors.append(
            TensorSpec(name, dims, GGMLQuantizationType.I8, b"", hole=math.prod(dims))
        )
    return builder.write_sparse(path)


def _type(architecture: str, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
    if _EXPERTS.search(name):
        if architecture == "gpt-oss":
            return _MXFP4
        return _Q5_0 if shape[0] % 256 else _Q4_K
    if len(shape) == 1 or _SMALL.search(name):
        return _F32
    return _F16 if shape[0] % 32 else _Q8_0
