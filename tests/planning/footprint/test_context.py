"""The memory of a context, and of computing, by metadata and options."""

from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import RequestError, SourceError
from moepack.planning.footprint.attention import Attention, attention_of
from moepack.planning.footprint.context import Cells, ContextLengths, ContextOptions, context_of
from moepack.planning.footprint.model import footprint_of
from moepack.source import gguf_header
from moepack.source.shards import Source
from tests.support import architectures
from tests.support.gguf_builder import GgufBuilder, moe
from tests.support.needs import needs_llama
from tests.support.values import some

Options = dict[str, Any]


def _attention(architecture: str = "qwen3moe", **pairs: Any) -> Attention:
    """Return the attention of a model of 4 layers, 8 heads and 2 KV heads of 64."""
    metadata: Options = {
        "block_count": 4,
        "embedding_length": 512,
        "attention__head_count": 8,
        "attention__head_count_kv": 2,
        **pairs,
    }
    builder = GgufBuilder().put("general.architecture", "str", architecture)
    for key, value in metadata.items():
        kind = "arr:u32" if isinstance(value, list) else "u32"
        if value is not None:
            builder.put(f"{architecture}.{key.replace('__', '.')}", kind, value)
    data = builder.bytes()
    return attention_of(Source((gguf_header.parse(data, "m.gguf", len(data)),)))


def _context(
    attention: Attention, token_count: int | None = 1024, **options: Any
) -> ContextLengths:
    return context_of(attention, ContextOptions(token_count)._replace(**options))


def test_keys_and_values_of_each_layer_are_counted() -> None:
    context = _context(_attention(), 1000)
    assert [layer.layer for layer in context.layers] == [0, 1, 2, 3]
    assert {layer.cells for layer in context.layers} == {(Cells(1024, 2 * 2 * 2 * 64),)}
    assert (context.token_count, context.length) == (1024, 4 * 1024 * 512)


def test_a_token_reads_the_cells_of_the_tokens_before_it() -> None:
    attention = _attention("gpt-oss", attention__sliding_window=128)
    context = _context(attention, 4096)
    assert [layer.cells[0].cell_count for layer in context.layers] == [768, 4096, 768, 4096]
    assert context.read_length(100) == 4 * 100 * 512
    assert context.read_length(4096) == (2 * 768 + 2 * 4096) * 512


def test_a_state_is_read_whatever_came_before() -> None:
    pairs = {"full_attention_interval": 4, "ssm__conv_kernel": 4, "ssm__state_size": 16}
    pairs |= {"ssm__inner_size": 64, "ssm__group_count": 2, "ssm__time_step_rank": 4}
    context = _context(_attention("qwen3next", **pairs))
    state = 4 * (3 * (64 + 2 * 2 * 16) + 64 * 16)
    assert [layer.state_length for layer in context.layers] == [state, state, state, 0]
    assert [bool(layer.cells) for layer in context.layers] == [False, False, False, True]
    assert context.read_length(0) == 3 * state
    several = _context(_attention("qwen3next", **pairs), sequence_count=4)
    assert several.read_length(0) == 12 * state


def test_without_a_count_the_model_says_how_many_tokens() -> None:
    assert _context(_attention(context_length=2048), None).token_count == 2048
    with pytest.raises(RequestError, match="does not state its context length"):
        _context(_attention(), None)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (64, {"type_k": "f64"}, "cache type of K: not a type for a cache, .*, found f64"),
        (24, {"type_k": "q8_0"}, "K: .* not whole blocks .* a multiple of 32, found 48"),
        (
            64,
            {"type_v": "q8_0", "has_flash_attention": False},
            "quantised values need flash attention",
        ),
    ],
)
def test_types_of_a_cache_that_llama_cpp_refuses_are_refused(
    length: int, options: Options, message: str
) -> None:
    attention = _attention(attention__key_length=length, attention__value_length=length)
    with pytest.raises(RequestError, match=message):
        _context(attention, **options)
    assert _context(_attention(), type_k="q8_0", has_flash_attention=False).length


@pytest.mark.parametrize(
    ("architecture", "pairs", "place", "actual"),
    [
        ("qwen3moe", {"block_count": None}, "block_count", "no such key"),
        ("qwen3moe", {"block_count": 513}, "block_count", 513),
        ("qwen3moe", {"attention__head_count": None}, "attention.head_count", "no such key"),
        ("qwen3moe", {"attention__head_count_kv": [1, 2]}, "attention.head_count_kv", "2"),
        ("mimo2", {"attention__sliding_window": 128}, "attention.sliding_window_pattern", None),
    ],
)
def test_metadata_that_does_not_say_what_it_must_is_named(
    architecture: str, pairs: Options, place: str, actual: object
) -> None:
    with pytest.raises(SourceError, match="does not determine the size of the context") as caught:
        _attention(architecture, **pairs)
    assert caught.value.place == f"key '{architecture}.{place}'"
    assert caught.value.found == (actual or "no such key")


@needs_llama
def test_a_model_that_caches_nothing_takes_as_much_for_any_count_of_tokens(tmp_path: Path) -> None:
    footprint = footprint_of(architectures.write("llada-moe", tmp_path / "m.gguf"))
    short, long = (footprint.compute_length(ContextOptions(count)) for count in (1024, 1 << 20))
    assert short == long


def test_without_the_number_of_experts_used_the_buffers_and_reads_of_a_token_are_unknown(
    tmp_path: Path,
) -> None:
    builder = moe((0,)).put("qwen3moe.embedding_length", "u32", 64)
    builder.put("qwen3moe.attention.head_count", "u32", 2)
    complete = footprint_of(builder.write(tmp_path / "complete.gguf"))
    builder.metadata = [pair for pair in builder.metadata if "used" not in pair[0]]
    unknown = footprint_of(builder.write(tmp_path / "unknown.gguf"))
    options = ContextOptions(512)
    assert unknown.compute_length(options) is None
    # 5 widths, three hidden layers of 2 experts in use, and a mask of 512 cells.
    assert complete.compute_length(options) == 512 * (4 * (5 * 64 + 3 * 2 * 32) + 2 * 512)
    assert unknown.context(options) == complete.context(options)
    weights = unknown.weights
    assert weights.layers[0].used_expert_length is None
    assert weights.read_expert_length is some(weights.parameters).active is None
    assert weights.read_dense_length is not None
