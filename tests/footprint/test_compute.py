"""The allowance for computing, against what llama.cpp reserves; and that it reserves what it says.

The bounds are what was measured, and say how honest the estimate is.
"""

from pathlib import Path
from typing import Any

import pytest

from moepack.footprint.context import ContextOptions
from moepack.footprint.model import footprint_of
from tests.support import architectures, large_models, llama_cpp_memory
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, first_shard
from tests.support.needs import needs_llama

pytestmark = needs_llama
_MIB = 1 << 20


def _ratios(path: Path, *, has_flash_attention: bool) -> list[float]:
    """Divide the estimate by what llama.cpp reserves, for short and long contexts."""
    footprint = footprint_of(path)
    asked: list[dict[str, Any]] = [
        {"n_ctx": count, "n_ubatch": batch, "flash_attn_type": int(has_flash_attention)}
        for count in (4096, 32768, 131072)
        for batch in (128, 512)
    ]
    memories = llama_cpp_memory.memories_of(path, [{**each, "swa_full": False} for each in asked])
    ratios = []
    for each, memory in zip(asked, memories, strict=True):
        options = ContextOptions(
            each["n_ctx"], batch_count=each["n_ubatch"], has_flash_attention=has_flash_attention
        )
        estimate = footprint.compute_length(options)
        assert estimate is not None
        ratios.append(estimate / memory.compute)
    return ratios


SPARSE, MIXED, WINDOWED = {"GLM-5", "GLM-5.2"}, {"LFM2-8B-A1B"}, {"Llama-4-Scout"}


@pytest.mark.long
@pytest.mark.parametrize("model", large_models.MODELS)
@pytest.mark.parametrize("has_flash_attention", [True, False])
def test_the_allowance_for_a_large_model_is_near_what_llama_cpp_reserves(
    model: str, has_flash_attention: bool, tmp_path: Path
) -> None:
    path = large_models.write(model, tmp_path / "m.gguf")
    ratios = _ratios(path, has_flash_attention=has_flash_attention)
    least, most = (0.97, 1.01) if has_flash_attention else (0.94, 1.06)
    if model in WINDOWED and has_flash_attention:
        least = 0.995
    if model in SPARSE:
        least, most = 0.9, 1.3
    if model in MIXED and has_flash_attention:
        most = 1.46
    assert least <= min(ratios) <= max(ratios) <= most


@pytest.mark.parametrize("model", REAL_MODELS)
def test_the_allowance_for_a_tiny_model_is_no_more_than_an_allowance(model: str) -> None:
    ratios = _ratios(first_shard(model), has_flash_attention=True)
    assert 0.7 <= min(ratios) <= max(ratios) <= 1.3


@pytest.mark.parametrize("model", REAL_MODELS)
def test_llama_cpp_takes_what_it_says_without_taking_it(model: str) -> None:
    options = {"n_ctx": 4096, "swa_full": False}
    said = llama_cpp_memory.memory_of(first_shard(model), **options)
    taken = llama_cpp_memory.reported(first_shard(model), **options)
    # It logs each buffer to a hundredth of a MiB.
    for name in ("model", "context", "compute"):
        assert getattr(taken, name) == pytest.approx(getattr(said, name), abs=0.02 * _MIB)


def test_what_keeps_nothing_takes_as_much_for_any_count_of_tokens(tmp_path: Path) -> None:
    footprint = footprint_of(architectures.write("llada-moe", tmp_path / "m.gguf"))
    short, long = (footprint.compute_length(ContextOptions(count)) for count in (1024, 1 << 20))
    assert short == long


def test_where_it_is_not_known_how_many_experts_are_used_there_is_no_allowance(
    tmp_path: Path,
) -> None:
    builder = moe((0,)).put("qwen3moe.embedding_length", "u32", 64)
    builder.put("qwen3moe.attention.head_count", "u32", 2)
    known = footprint_of(builder.write(tmp_path / "known.gguf"))
    builder.metadata = [pair for pair in builder.metadata if "used" not in pair[0]]
    unknown = footprint_of(builder.write(tmp_path / "unknown.gguf"))
    options = ContextOptions(512)
    assert unknown.compute_length(options) is None
    # 5 widths, three hidden layers of 2 experts in use, and a mask of 512 cells.
    assert known.compute_length(options) == 512 * (4 * (5 * 64 + 3 * 2 * 32) + 2 * 512)
    assert unknown.context(options) == known.context(options)
