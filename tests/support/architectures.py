"""Small models of the architectures that llama.cpp b11549 runs, with random weights.

A row says what of a model's metadata is not as in the others. Which tensors it has, and of which
shapes, llama.cpp says itself: given a header alone, it asks for each of them. What metadata an
architecture needs is in its `load_arch_hparams` (src/models/*.cpp).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants

from tests.support import llama_cpp, llama_cpp_memory
from tests.support.gguf_builder import GgufBuilder, TensorSpec, kind_of

WORDS = 256
"""Of the vocabulary, which cannot make tokens of a text."""
_EXPERTS, _LAYERS, _HEADS, _WIDTH, _N_FF = 8, 3, 2, 128, 96
_Q8_0, _F16, _F32 = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.F32,
)
_EXPERT_WEIGHT = re.compile(r"(?:ffn_(gate|up|gate_up|down)_(?:ch)?exps|attn_v_exps)\.weight")
_PLAIN = r"scale$"
_MTP = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")

Pairs = dict[str, Any]
_NONE: Pairs = {}
_OF_OTHER_LAYERS = {"attention.indexer.types", "ple.layer_multipliers"}
"""Lists that are not longer when there is a layer for multi-token prediction."""


class Architecture(NamedTuple):
    """A model to make: its metadata beside the usual, without the architecture's name in the keys.

    Of the tensors that it may have, it has not those that match `without`. `has_two` is for those
    that llama.cpp would take gate and up of in one: it has them apart. `unlisted` are tensors that
    it has and llama.cpp does not ask for; then it is asked about a model without MTP.
    """

    name: str
    pairs: Pairs
    without: str = _PLAIN
    has_two: bool = False
    unlisted: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def with_mtp(self, *unlisted: str) -> "Architecture":
        """Return the model with one layer more, for multi-token prediction.

        Of some architectures llama.cpp does not list it; then the names of what it has beside what
        other layers have are given.
        """
        count = self.pairs.get("block_count", _LAYERS)
        longer = {
            key: [*value, value[-1]]
            for key, value in self.pairs.items()
            if isinstance(value, list) and len(value) == count and key not in _OF_OTHER_LAYERS
        }
        pairs = {**self.pairs, **longer, "block_count": count + 1, "nextn_predict_layers": 1}
        shapes = {
            f"blk.{count}.{name}.weight": (2 * _WIDTH, _WIDTH) if "proj" in name else (_WIDTH,)
            for name in unlisted
        }
        return self._replace(pairs=pairs, unlisted=shapes)


def _each(*values: Any) -> list[Any]:
    """Repeat values until each layer has one."""
    return [values[layer % len(values)] for layer in range(_LAYERS)]


_USUAL: Pairs = {
    "block_count": _LAYERS,
    "context_length": 256,
    "embedding_length": _WIDTH,
    "feed_forward_length": _N_FF,
    "vocab_size": WORDS,
    "leading_dense_block_count": 1,
    "full_attention_interval": 2,
    "logit_scale": 1.0,
    "residual_scale": 1.5,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.clamp_kqv": 1.0,
    "attention.max_alibi_bias": 8.0,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": 2,
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 1 << 17,
    "attention.indexer.block_size": 4,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.local_blocks": 1,
    "rope.dimension_sections": [16, 16, 16, 16],
    "expert_count": _EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": _N_FF,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 64,
    "expert_latent_length": _N_FF,
    "expert_gating_func": 2,
    "ssm.inner_size": 2 * _WIDTH,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.time_step_rank": _HEADS,
    "ssm.group_count": 2,
    "kda.head_dim": 128,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "shortconv.l_cache": 3,
    "attn_res.block_size": 12,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
}
_STATE: Pairs = {  # each second layer keeps a state, and has no attention
    "attention.head_count": _each(_HEADS, 0),
    "attention.head_count_kv": _each(_HEADS, 0),
}
_LATENT: Pairs = {  # keys and values are compressed, as DeepSeek-V2 has them
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
}
_LATENT_STATE: Pairs = _LATENT | {
    "attention.head_count": _each(1, 0),
    "attention.head_count_kv": _each(1, 0),
}
_SLIDING: Pairs = {"attention.sliding_window_pattern": _each(0, 1), "rope.freq_base_swa": 1e4}
_INDEXED: Pairs = {"attention.indexer.types": _each(1, 0)}
_LATENT_SLIDING: Pairs = (
    _LATENT
    | _SLIDING
    | {f"{key}_swa": value for key, value in _LATENT.items() if re.search("length|rank", key)}
)
_HYPER: Pairs = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
    "swiglu_clamp_exp": 10.0,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}
_EMBEDDED_BY_LAYER: Pairs = {
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "ple.layer_multipliers": [1, 3, 5],
    "ple.head_offsets": [WORDS * head for head in range(4)],
    "ple.head_vocab_sizes": [WORDS] * 4,
    "embedding_length_per_layer_input": _WIDTH // 4,
    "attention.compress_ratios": _each(4),
}
_LONG = {"ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"}

_PLAIN_NAMES = (
    *("afmoe", "arctic", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2-ocr", "dots1"),
    *("exaone-moe", "glm4moe", "gpt-oss", "granite", "granitemoe", "grok", "hunyuan-moe", "hy_v3"),
    *("laguna", "llada-moe", "llama", "mellum", "minicpm", "minimax-01", "minimax-m2", "mistral3"),
    *("olmoe", "phimoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "refact"),
    *("rnd1", "smallthinker"),
)
_PAIRS: dict[str, Pairs] = {
    **dict.fromkeys(("cohere2moe", "granite_swa", "mimo2", "step35"), _SLIDING),
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa", "mistral4"), _LATENT),
    **dict.fromkeys(("granitehybrid", "jamba", "lfm2moe"), _STATE),
    **dict.fromkeys(("kimi-k3", "kimi-linear"), _LATENT_STATE),
    "bailingmoe3": _LATENT_STATE
    | {
        "rope.dimension_sections": [8, 12, 12, 0],
        "swiglu_clamp_exp": _each(0.0, 4.0),
        "swiglu_clamp_shexp": _each(0.0, 5.0),
    },
    "deepseek4": _HYPER
    | {
        "block_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": 32,
        "hash_layer_count": 1,  # whose experts follow from the token
        "expert_gating_func": 4,
    },
    "dots3note": _LATENT_SLIDING | _INDEXED,
    "ernie4_5-moe": {"interleave_moe_layer_step": 1},
    "gemma4": _SLIDING
    | {
        "embedding_length_per_layer_input": 64,
        "attention.key_length_swa": 64,
        "attention.value_length_swa": 64,
    },
    "glm5-next": _LATENT
    | _HYPER
    | _EMBEDDED_BY_LAYER
    | _INDEXED
    | {
        "attention.head_count_kv": _each(1, 0),
        "attention.key_length": 512,
        "rope.dimension_count": 0,
    },
    "grovemoe": {"experts_per_group": 2, "expert_group_scale": 0.5},
    "hy_v4": _LATENT | _HYPER | _INDEXED,
    "k2-horizon": {
        "attention.value_expert_count": 4,
        "attention.value_expert_used_count": 2,
        "rope.scaling.yarn_beta_fast": 128.0,
        "rope.scaling.yarn_beta_slow": 4.0,
    },
    "llama4": {"block_count": 4, "interleave_moe_layer_step": 2},
    "maple": _SLIDING | {"swiglu_clamp_exp": 7.0},
    "minimax-m3": {"rope.dimension_count": 64, "attention.indexer.head_count": _HEADS},
    "nemotron_h_moe": _STATE | {"feed_forward_length": [0, 0, _N_FF]},
    "qwen4exp": _HYPER | _EMBEDDED_BY_LAYER | {"attention.indexer.key_length": 64},
}
_ROWS = {name: Architecture(name, _PAIRS.get(name, _NONE)) for name in (*_PLAIN_NAMES, *_PAIRS)}
_ROWS["gemma4"] = _ROWS["gemma4"]._replace(without="input_scale$")

MODELS: dict[str, Architecture] = {
    **_ROWS,
    **{
        f"{name} with MTP": _ROWS[name].with_mtp()
        for name in (
            *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe"),
            *("glm5-next", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35moe", "qwen3next"),
            *("qwen4exp", "step35"),
        )
    },
    "bailingmoe2 with MTP": _ROWS["bailingmoe2"].with_mtp(*_MTP, "layer_output_norm"),
    "deepseek4 with MTP": _ROWS["deepseek4"].with_mtp(*_MTP),
    "deepseek4 that states MTP and has none": Architecture(
        "deepseek4", {**_PAIRS["deepseek4"], "nextn_predict_layers": 1}
    ),
    **{
        f"{name} with scales": _ROWS[name]._replace(without="^$")
        for name in ("cohere2moe", "gpt-oss", "grovemoe", "llama", "nemotron_h_moe", "qwen3moe")
    },
    **{
        f"{name} with gate and up": _ROWS[name]._replace(has_two=True)
        for name in ("deepseek2", "gemma4", "granite_swa", "hy_v3", "mistral4", "qwen3next")
    },
    "deepseek2 with groups": Architecture(
        "deepseek2", _LATENT | {"expert_group_count": 4, "expert_group_used_count": 2}
    ),
    "nemotron_h_moe with a width for each layer": Architecture(
        "nemotron_h_moe",
        {
            "block_count": 4,
            "attention.head_count": [_HEADS, 0, 0, 0],
            "attention.head_count_kv": [_HEADS, 0, 0, 0],
            "feed_forward_length": [0, 0, _N_FF, _N_FF],
            "expert_feed_forward_length": [_N_FF, _N_FF, _N_FF, 64],
            "expert_used_count": [2, 2, 2, 3],
        },
    ),
}
"""By what a test calls them: all that have experts."""

_NO_EXPERTS: Pairs = {
    "block_count": 35,
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window_pattern": None,
    "full_attention_interval": None,
}
_NO_EXPERTS_STATE: Pairs = _NO_EXPERTS | _STATE | {"block_count": _LAYERS}

DENSE: dict[str, Architecture] = {
    name: Architecture(name, pairs)
    for name, pairs in {
        **dict.fromkeys(("cohere2", "falcon-h1", "gemma3", "mamba"), _NO_EXPERTS),
        **dict.fromkeys(("gemma3n", "mamba2", "muse-glimmer", "olmo2"), _NO_EXPERTS),
        **dict.fromkeys(("plamo3", "qwen35"), _NO_EXPERTS),
        "gemma2": _NO_EXPERTS | {"attention.sliding_window": None},
        "lfm2": _NO_EXPERTS_STATE,
        "nemotron_h": _NO_EXPERTS_STATE | {"feed_forward_length": [0, 0, _N_FF]},
        "plamo2": _NO_EXPERTS_STATE | {"ssm.group_count": 0},
    }.items()
}
"""Models without experts, whose context is as interesting."""


def write(
    model: str, path: Path, *, has_weights: bool = True, has_experts: bool = True, **sizes: int
) -> Path:
    """Write one of these models, with random weights or with a hole in their place.

    Without `has_experts` only theirs are holes. `sizes` are metadata with other values.
    """
    architecture = {**MODELS, **DENSE}[model]
    pairs = {**_USUAL, **architecture.pairs, **sizes}
    header = _header(architecture.name, pairs)
    if architecture.unlisted:
        header = _header(architecture.name, {**pairs, "nextn_predict_layers": 0})
    wanted = llama_cpp_memory.wanted_tensors(header.write(path)) | dict(architecture.unlisted)
    builder = _header(architecture.name, pairs)
    random = np.random.Generator(np.random.SFC64(len(model)))
    for name, shape in wanted.items():
        if re.search(architecture.without, name):
            continue
        names, own_shape = [name], shape
        if architecture.has_two and "gate_up_exps" in name:
            names = [name.replace("gate_up", half) for half in ("gate", "up")]
            own_shape = shape[0], shape[1] // 2, shape[2]
        for own_name in names:
            is_hole = not has_weights or (not has_experts and "_exps" in own_name)
            draws = None if is_hole else random
            builder.tensors.append(_tensor(own_name, own_shape, draws))
    return builder.write_sparse(path)


def _header(architecture: str, pairs: Pairs) -> GgufBuilder:
    builder = GgufBuilder().put("general.architecture", "str", architecture)
    for key, value in pairs.items():
        if value is not None:
            kind = "arr:u64" if key in _LONG else kind_of(value)
            builder.put(f"{architecture}.{key}", kind, value)
    builder.put("tokenizer.ggml.model", "str", "test")
    builder.put("tokenizer.ggml.tokens", "arr:str", [f"word {word}" for word in range(WORDS)])
    return builder.put("tokenizer.ggml.scores", "arr:f32", [0.0] * WORDS)


def _tensor(name: str, shape: tuple[int, ...], random: np.random.Generator | None) -> TensorSpec:
    match = _EXPERT_WEIGHT.search(name)
    kind = _F32 if match is None else _F16 if match[1] == "down" else _Q8_0
    if random is None:
        kind = GGMLQuantizationType.I32 if "tid2eid" in name else kind
        length = llama_cpp.row_size(int(kind), shape[0]) * math.prod(shape[1:])
        return TensorSpec(name, shape, int(kind), b"", hole=length)
    if "tid2eid" in name:  # by token, the experts that it uses
        used, count = shape
        experts = np.argsort(random.random((count, _EXPERTS)))[:, :used].astype(np.int32)
        return TensorSpec(name, shape, int(GGMLQuantizationType.I32), experts.tobytes())
    weights = random.standard_normal(shape[::-1], np.float32)
    if re.search("norm|scale", name):
        weights /= 10
        weights += 1
    elif "ssm_a" in name:
        weights = -np.abs(weights)  # what a state keeps of itself
    else:
        # A router's bias that outweighs what it sees would have it choose the same ones always.
        weights /= math.sqrt(shape[0]) if len(shape) > 1 else 20
    return TensorSpec(name, shape, int(kind), quants.quantize(weights, kind).tobytes())
