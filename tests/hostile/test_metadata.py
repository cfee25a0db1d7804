"""Numbers in a model's metadata that no model has: refused, or unknown, and never worked with."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError, SourceError
from moepack.report.facts import JsonValue, to_json
from moepack.report.model_text import source as source_text
from moepack.source.experts import find_experts
from moepack.source.shards import open_source
from tests.support.gguf_builder import F32, Q8_0, GgufBuilder, moe
from tests.support.hostile_input import assert_clear
from tests.support.machines import machine
from tests.support.models import contents

BOX = machine(vram=24, vram_bandwidth=936, bandwidth=40, drive=3)

LAYERS, EXPERTS = 3, 4
NO_NUMBERS = [
    *(("u32", 0), ("i32", -1), ("u64", 2**64 - 1), ("i64", -(2**63)), ("u32", EXPERTS + 1)),
    *(("f32", 2.0), ("f64", float("nan")), ("bool", True), ("str", "2")),
    *(("arr:i32", [-1] * LAYERS), ("arr:u64", [2**64 - 1] * LAYERS), ("arr:u32", [9])),
    *(("arr:f32", [float("nan")] * LAYERS), ("arr:f64", [float("inf")] * LAYERS)),
    *(("arr:bool", [True] * LAYERS), ("arr:str", ["2"] * LAYERS), ("arr:u32", [])),
]
COUNTS = (
    *("expert_count", "expert_used_count", "experts_per_group", "block_count"),
    *("nextn_predict_layers", "context_length"),
    *("attention.value_expert_count", "attention.value_expert_used_count"),
)
"""What decides about experts and layers."""
_EVERYWHERE = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "embedding_length", "feed_forward_length"),
)
WIDTHS = {
    "qwen3moe": _EVERYWHERE,
    "gemma4": (
        *("attention.shared_kv_layers", "attention.sliding_window"),
        *("attention.sliding_window_pattern", "attention.key_length_swa"),
    ),
    "deepseek4": ("attention.compress_ratios", "attention.indexer.key_length"),
    "lfm2moe": ("shortconv.l_cache",),
    "granitehybrid": ("ssm.conv_kernel", "ssm.inner_size", "ssm.group_count", "ssm.state_size"),
    "kimi-linear": ("kda.head_dim", "attention.key_length_mla"),
    "qwen4exp": (
        *("ple.layers", "ple.conv_kernel", "ple.ngram_size", "hyper_connection.count"),
        *("attention.recurrent_layers", "full_attention_interval"),
    ),
    "glm-dsa": ("attention.indexer.types", "attention.indexer.kpool"),
    "minimax-m3": ("leading_dense_block_count",),
}
"""By architecture, what decides how long a context is."""
_ATTENTION = {
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.indexer.key_length": 32,
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": 2,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "context_length": 256,
    "kda.head_dim": 32,
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 32,
}


def model(architecture: str = "qwen3moe") -> GgufBuilder:
    """Build a model with experts of all families, whose context is known."""
    builder = moe((1, 2), EXPERTS, architecture=architecture)
    for key, value in _ATTENTION.items():
        builder.put(f"{architecture}.{key}", "u32", value)
    builder.put(f"{architecture}.experts_per_group", "u32", 2)
    builder.put(f"{architecture}.attention.value_expert_used_count", "u32", 2)
    for name in ("gate", "up", "down"):
        builder.tensor(f"blk.1.ffn_{name}_chexps.weight", (32, 32, 2), Q8_0, 34)
    return builder.tensor("blk.1.attn_v_exps.weight", (64, 16, 6), F32, 256)


def negatives(value: JsonValue) -> list[float]:
    """List the numbers below 0 in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in negatives(item)]
    return [value] if isinstance(value, int | float) and value < 0 else []


@pytest.mark.parametrize("key", COUNTS)
def test_whatever_a_header_counts_a_model_is_refused_or_its_pack_is_sound(
    key: str, tmp_path: Path
) -> None:
    outcomes = set()
    for kind, value in NO_NUMBERS:
        path = model().put(f"qwen3moe.{key}", kind, value).write(tmp_path / "model.gguf")
        try:
            facts = moepack.inspect(path)
            moepack.pack_model(path, tmp_path / "pack")
        except SourceError as error:
            assert_clear(error, path)
            with pytest.raises(SourceError):
                moepack.index_model(path, tmp_path / "index")
            outcomes.add("refused")
            continue
        report = moepack.verify(tmp_path / "pack", path)
        assert report.passed, (kind, value, report.findings)
        assert not negatives(to_json(facts))
        shutil.rmtree(tmp_path / "pack")
        outcomes.add("sound")
    assert "sound" in outcomes


@pytest.mark.parametrize("architecture", WIDTHS)
def test_whatever_a_header_says_of_attention_no_figure_comes_of_nonsense(
    architecture: str, tmp_path: Path
) -> None:
    figure_count = 0
    for key in WIDTHS[architecture]:
        for kind, value in NO_NUMBERS:
            builder = model(architecture).put(f"{architecture}.{key}", kind, value)
            path = builder.write(tmp_path / "model.gguf")
            for call in (moepack.forecast, moepack.place):
                try:
                    facts: Any = call(path, BOX)
                except SourceError as error:
                    assert_clear(error, path)
                    continue
                except RequestError:  # it would take more memory than there is
                    continue
                figure_count += 1
                assert not negatives(to_json(facts)), (key, kind, value)
    assert figure_count


CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("expert_used_count", "u32", 5, "layer 1, expected 1 to 4, found 5"),
    ("expert_used_count", "u32", 0, "layer 1, expected 1 to 4, found 0"),
    ("expert_used_count", "i32", -1, "layer 1, expected 1 to 4, found -1"),
    ("expert_used_count", "arr:u32", [9, 2, 5], "layer 2, expected 1 to 4, found 5"),
    ("attention.value_expert_used_count", "u32", 7, "layer 1, expected 1 to 6, found 7"),
    ("expert_count", "u32", 0, "layer 1 has experts, and it states none"),
    ("expert_count", "arr:i32", [0, 4, -4], "layer 2 has experts, and it states none"),
    ("attention.value_expert_count", "u32", 0, "layer 1 has experts, and it states none"),
    ("nextn_predict_layers", "u32", 3, "expected fewer than 3, found 3"),
    ("nextn_predict_layers", "i32", -1, "expected fewer than 3, found -1"),
]


@pytest.mark.parametrize(("key", "kind", "value", "words"), CONTRADICTIONS)
def test_what_the_tensors_refute_is_refused_by_the_name_of_its_key(
    key: str, kind: str, value: Any, words: str, tmp_path: Path
) -> None:
    path = model().put(f"qwen3moe.{key}", kind, value).write(tmp_path / "model.gguf")
    with pytest.raises(SourceError) as caught:
        moepack.inspect(path)
    assert_clear(caught.value, path)
    assert caught.value.place == f"key 'qwen3moe.{key}'"
    assert words in str(caught.value)
    assert "metadata of this file is wrong" in str(caught.value.hint)
    before = path.read_bytes()
    with pytest.raises(SourceError, match="key"):
        moepack.pack_in_place(path, tmp_path / "pack")
    assert contents(tmp_path) == {path.name: before}


def test_what_is_said_of_layers_without_experts_is_not_looked_at(tmp_path: Path) -> None:
    builder = model().put("qwen3moe.expert_used_count", "arr:i32", [-1, 2, 3])
    builder.put("qwen3moe.expert_count", "arr:i32", [0, 4, 4])
    families = find_experts(open_source(builder.write(tmp_path / "model.gguf"))).families
    assert [family.experts_used for family in families] == [2, 2, 2, 3]


def test_a_token_uses_no_more_chunk_experts_than_there_are(tmp_path: Path) -> None:
    """Three routed experts of four share two of them: at most two are used."""
    path = model().put("qwen3moe.expert_used_count", "u32", 3).write(tmp_path / "model.gguf")
    used = {family.name: family.experts_used for family in find_experts(open_source(path)).families}
    assert used == {"ffn_exps": 3, "ffn_chexps": 2, "attn_v_exps": 2}
    moepack.pack_model(path, tmp_path / "pack")
    assert moepack.verify(tmp_path / "pack", path).passed
    text = str(source_text(moepack.inspect(path)))  # type: ignore[arg-type]
    assert "experts per token     3\n" in text
