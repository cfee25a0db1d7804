"""Footprints against llama.cpp: weights and contexts to the byte, compute buffers within bounds.

The bounds are measured, and say how honest the estimate is.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest

from moepack.planning.footprint import rules
from moepack.planning.footprint.attention import attention_of
from moepack.planning.footprint.context import CACHE_TYPES, ContextOptions, context_of
from moepack.planning.footprint.model import footprint_of
from moepack.planning.footprint.weights import Weights
from moepack.source.shards import open_source
from tests.support import architectures, large_models, llama_cpp_memory
from tests.support.llama_cpp_memory import Memory
from tests.support.models import FIXTURES, REAL_MODELS, first_shard
from tests.support.needs import needs_llama
from tests.support.values import some

Options = dict[str, Any]
_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
_TYPES |= {"iq4_nl": 20, "bf16": 30}
_NAMES = {number: name for name, number in _TYPES.items()}
_MIB = 1 << 20
_PADDING = 32
"""Bytes to which llama.cpp rounds each tensor up if it does not map the file."""

ONE_SEQUENCE: list[Options] = [
    {"n_ctx": 256},
    {"n_ctx": 1000, "n_ubatch": 64},
    {"n_ctx": 8192},
    {"n_ctx": 8192, "swa_full": True},
    {"n_ctx": 2048, "flash_attn_type": 0},
    {"n_ctx": 4096, "type_k": 30, "type_v": 30},
]
SEVERAL: list[Options] = [
    {"n_ctx": 4096, "n_seq_max": 3},
    {"n_ctx": 4096, "n_seq_max": 3, "kv_unified": True},
    {"n_ctx": 4096, "n_seq_max": 9, "kv_unified": True, "n_ubatch": 64},
]
LARGE: list[Options] = [
    {"n_ctx": 32768, "n_ubatch": 2048, "type_k": 8, "type_v": 8},
    *(
        {"n_ctx": count, "n_ubatch": batch, "flash_attn_type": flash}
        for count, batch in ((4096, 128), (131072, 512))
        for flash in (0, 1)
    ),
]
DENSE = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
ABORTS_WITH_SEVERAL = {"minimax-01", "kimi-linear"}
"""With the widths that these have here, llama.cpp fails an assertion of its own."""
SPARSE, MIXED, WINDOWED = {"GLM-5", "GLM-5.2"}, {"LFM2-8B-A1B"}, {"Llama-4-Scout"}


def _ours(options: Options) -> ContextOptions:
    return ContextOptions(
        options["n_ctx"],
        type_k=_NAMES[options.get("type_k", 1)],
        type_v=_NAMES[options.get("type_v", 1)],
        batch_count=options.get("n_ubatch", 512),
        sequence_count=options.get("n_seq_max", 1),
        is_unified=options.get("kv_unified", False),
        has_flash_attention=options.get("flash_attn_type", 1) == 1,
        swa_full=options.get("swa_full", False),
    )


def _compared(path: Path, each: list[Options]) -> list[Memory]:
    """Compare contexts; return the memory that llama.cpp takes with each."""
    attention = attention_of(open_source(path))
    complete = [{"swa_full": False, "flash_attn_type": 1, **options} for options in each]
    memories = llama_cpp_memory.memories_of(path, complete)
    for options, memory in zip(complete, memories, strict=True):
        assert context_of(attention, _ours(options)).length == memory.context, options
    return memories


def _compare_weights(path: Path, weights: Weights, length: int) -> None:
    """Compare weights with the `length` that llama.cpp takes."""
    tensors = gguf.GGUFReader(path).tensors
    assert 0 <= length - some(weights.length) < _PADDING * len(tensors)


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", architectures.MODELS)
def test_each_architecture_takes_what_llama_cpp_says(model: str, tmp_path: Path) -> None:
    path = architectures.write(model, tmp_path / "m.gguf", has_weights=False)
    each = ONE_SEQUENCE + ([] if model in ABORTS_WITH_SEVERAL else SEVERAL)
    _compare_weights(path, footprint_of(path).weights, _compared(path, each)[0].model)


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", architectures.DENSE)
def test_a_model_without_experts_has_the_context_that_llama_cpp_says(
    model: str, tmp_path: Path
) -> None:
    path = architectures.write(model, tmp_path / "m.gguf", has_weights=False)
    _compared(path, ONE_SEQUENCE + SEVERAL)


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", large_models.MODELS)
def test_a_large_model_takes_what_llama_cpp_says(model: str, tmp_path: Path) -> None:
    path = large_models.write(model, tmp_path / "m.gguf")
    memories = _compared(path, LARGE)
    footprint = footprint_of(path)
    _compare_weights(path, footprint.weights, memories[0].model)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for options, memory in zip(LARGE, memories, strict=True):
        if "flash_attn_type" in options:
            estimate = some(footprint.compute_length(_ours(options)))
            ratios[bool(options["flash_attn_type"])].append(estimate / memory.compute)
    least, most = (0.995 if model in WINDOWED else 0.97), (1.46 if model in MIXED else 1.01)
    flash, plain = ((0.9, 1.3),) * 2 if model in SPARSE else ((least, most), (0.94, 1.06))
    assert flash[0] <= min(ratios[True]) <= max(ratios[True]) <= flash[1]
    assert plain[0] <= min(ratios[False]) <= max(ratios[False]) <= plain[1]


@needs_llama
@pytest.mark.parametrize("model", [*REAL_MODELS, DENSE], ids=lambda one: Path(one).stem)
def test_a_real_model_takes_what_llama_cpp_says(model: str | Path) -> None:
    path = model if isinstance(model, Path) else first_shard(model)
    batches: list[Options] = [{"n_ctx": 4096}, {"n_ctx": 131072, "n_ubatch": 128}]
    memories = _compared(path, batches + ONE_SEQUENCE + SEVERAL)
    if isinstance(model, Path):
        return
    for options, memory in zip(batches, memories, strict=False):
        estimate = some(footprint_of(path).compute_length(_ours(options)))
        assert 0.9 <= estimate / memory.compute <= 1.15, "of a tiny model no more than an allowance"
    # It logs each buffer to a hundredth of a MiB.
    logged = llama_cpp_memory.reported(path, n_ctx=4096, swa_full=False)
    for length, said in zip(logged, memories[0], strict=True):
        assert length == pytest.approx(said, abs=0.02 * _MIB), "it takes what it says"


@needs_llama
@pytest.mark.parametrize(("used", "hidden"), [(2, 256), (8, 512), (8, 1536), (4, 2048), (8, 6144)])
def test_outputs_of_experts_are_counted_where_no_logits_are_longer(
    used: int, hidden: int, tmp_path: Path
) -> None:
    """Beside hidden layers in which all experts of a token have so many elements together."""
    sizes: Any = {"embedding_length": 1024, "expert_count": 16, "attention.key_length": 64}
    sizes |= {"attention.value_length": 64, "context_length": 4096}
    sizes |= {"expert_used_count": used, "expert_feed_forward_length": hidden // used}
    path = architectures.write("qwen3moe", tmp_path / "m.gguf", has_weights=False, **sizes)
    memory = llama_cpp_memory.memory_of(path, n_ctx=512, n_ubatch=512, swa_full=False)
    estimate = some(footprint_of(path).compute_length(ContextOptions(512)))
    assert estimate == pytest.approx(memory.compute, rel=0.01)


@needs_llama
@pytest.mark.long
def test_all_types_of_a_cache_are_as_long_as_llama_cpps(tmp_path: Path) -> None:
    path = large_models.write("gpt-oss-120b", tmp_path / "m.gguf")
    pairs = [(k, v) for one in CACHE_TYPES for k, v in ((one, one), (one, "f16"), ("q8_0", one))]
    _compared(path, [{"n_ctx": 5000, "type_k": _TYPES[k], "type_v": _TYPES[v]} for k, v in pairs])


@needs_llama
def test_an_output_that_is_the_embedding_is_in_memory_once(tmp_path: Path) -> None:
    path = large_models.write("Qwen3-30B-A3B", tmp_path / "m.gguf", without="^output.weight")
    weights = footprint_of(path).weights
    outer = some(weights.outer)
    assert outer.is_tied
    assert outer.output_length == outer.embedding_length
    _compare_weights(path, weights, llama_cpp_memory.memory_of(path, n_ctx=256).model)


def test_the_architectures_of_all_rules_are_compared() -> None:
    each = (*architectures.MODELS.values(), *architectures.DENSE.values())
    compared = {model.name for model in each} | {name for name, _ in large_models.MODELS.values()}
    special = {*rules.WINDOWS, *rules.STATES, *rules.INDEXED, *rules.NO_CACHE}
    assert special - compared == {"dream", "llada"}  # which are as llada-moe is
