"""What a context takes, held against llama.cpp to the byte, for all architectures with experts."""

from pathlib import Path
from typing import Any

import pytest

from moepack.errors import RequestError, SourceError
from moepack.footprint import rules
from moepack.footprint.attention import Attention, attention_of
from moepack.footprint.context import CACHE_TYPES, Cells, Context, ContextOptions, context_of
from moepack.footprint.model import footprint_of
from moepack.source import gguf_header
from moepack.source.shards import Source, open_source
from tests.support import architectures, large_models, llama_cpp_memory
from tests.support.gguf_builder import GgufBuilder, moe
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, pack_model
from tests.support.needs import needs_llama

Options = dict[str, Any]
_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
_TYPES |= {"iq4_nl": 20, "bf16": 30}
_NAMES = {number: name for name, number in _TYPES.items()}

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
DENSE = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
ABORTS_WITH_SEVERAL = {"minimax-01", "kimi-linear"}
"""With the widths that these have here, llama.cpp fails an assertion of its own."""


def _ours(asked: Options) -> ContextOptions:
    return ContextOptions(
        asked["n_ctx"],
        type_k=_NAMES[asked.get("type_k", 1)],
        type_v=_NAMES[asked.get("type_v", 1)],
        batch_count=asked.get("n_ubatch", 512),
        sequence_count=asked.get("n_seq_max", 1),
        is_unified=asked.get("kv_unified", False),
        has_flash_attention=asked.get("flash_attn_type", 1) == 1,
        swa_full=asked.get("swa_full", False),
    )


def _compare(path: Path, each: list[Options]) -> None:
    attention = attention_of(open_source(path))
    asked = [{"swa_full": False, "flash_attn_type": 1, **options} for options in each]
    for options, memory in zip(asked, llama_cpp_memory.memories_of(path, asked), strict=True):
        assert context_of(attention, _ours(options)).length == memory.context, options


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", architectures.MODELS)
def test_the_context_of_each_architecture_is_as_long_as_llama_cpps(
    model: str, tmp_path: Path
) -> None:
    path = architectures.write(model, tmp_path / "m.gguf", has_weights=False)
    _compare(path, ONE_SEQUENCE + ([] if model in ABORTS_WITH_SEVERAL else SEVERAL))


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", [*large_models.MODELS, *large_models.DENSE])
def test_the_context_of_a_large_model_is_as_long_as_llama_cpps(model: str, tmp_path: Path) -> None:
    path = large_models.write(model, tmp_path / "m.gguf")
    each = [{"n_ctx": 4096}, {"n_ctx": 131072}, {"n_ctx": 32768, "n_ubatch": 2048}]
    each += [{"n_ctx": 32768, "type_k": 8, "type_v": 8}, {"n_ctx": 16384, "flash_attn_type": 0}]
    _compare(path, each)


@needs_llama
@pytest.mark.parametrize("model", [*map(first_shard, REAL_MODELS), DENSE], ids=lambda p: p.stem)
def test_the_context_of_a_real_model_is_as_long_as_llama_cpps(model: Path) -> None:
    _compare(model, ONE_SEQUENCE + SEVERAL)


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_all_types_of_a_cache_are_as_long_as_llama_cpps(cache_type: str, tmp_path: Path) -> None:
    path = large_models.write("gpt-oss-120b", tmp_path / "m.gguf")
    pairs = [(cache_type, cache_type), (cache_type, "f16"), ("q8_0", cache_type)]
    each = [{"n_ctx": 5000, "type_k": _TYPES[k], "type_v": _TYPES[v]} for k, v in pairs]
    _compare(path, each)


def test_the_tables_know_the_architectures_that_are_compared_and_no_others() -> None:
    compared = {model.name for model in architectures.MODELS.values()}
    compared |= {name for name, _ in (*large_models.MODELS.values(), *large_models.DENSE.values())}
    assert rules.KNOWN - compared == {"dream", "llada"}  # which are as llada-moe is
    assert compared <= rules.KNOWN


def _attention(architecture: str = "qwen3moe", **pairs: Any) -> Attention:
    """Return the attention of a model of 4 layers, 8 heads and 2 KV heads of 64."""
    stated: Options = {
        "block_count": 4,
        "embedding_length": 512,
        "attention__head_count": 8,
        "attention__head_count_kv": 2,
        **pairs,
    }
    builder = GgufBuilder().put("general.architecture", "str", architecture)
    for key, value in stated.items():
        kind = "arr:u32" if isinstance(value, list) else "u32"
        if value is not None:
            builder.put(f"{architecture}.{key.replace('__', '.')}", kind, value)
    data = builder.bytes()
    return attention_of(Source((gguf_header.parse(data, "m.gguf", len(data)),)))


def _context(attention: Attention, token_count: int | None = 1024, **options: Any) -> Context:
    return context_of(attention, ContextOptions(token_count)._replace(**options))


def _named(name: str, value: Any) -> Options:
    return {name: value}


def test_keys_and_values_of_each_layer_are_counted() -> None:
    context = _context(_attention(), 1000)
    assert [layer.layer for layer in context.layers] == [0, 1, 2, 3]
    assert {layer.cells for layer in context.layers} == {(Cells(1024, 2 * 2 * 2 * 64),)}
    assert (context.token_count, context.length) == (1024, 4 * 1024 * 512)
    assert (context.kv_length, context.state_length) == (context.length, 0)
    assert not context.is_assumed


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
    assert context.read_length(0) == context.state_length == 3 * state
    assert _context(_attention("qwen3next", **pairs), sequence_count=4).state_length == 12 * state


def test_an_architecture_that_is_not_known_is_taken_to_be_plain_and_said_to_be() -> None:
    unknown = _context(_attention("something-new"))
    assert unknown.is_assumed
    assert unknown.layers == _context(_attention()).layers


def test_without_a_count_the_model_says_how_many_tokens() -> None:
    assert _context(_attention(context_length=2048), None).token_count == 2048
    with pytest.raises(RequestError, match="does not state its context length"):
        _context(_attention(), None)


def test_a_context_of_gibibytes_costs_nothing_to_know() -> None:
    assert _context(_attention(), 1 << 30).length == 4 * (1 << 30) * 512


@pytest.mark.parametrize("which", ["type_k", "type_v"])
def test_a_type_that_is_not_offered_is_refused(which: str) -> None:
    with pytest.raises(RequestError, match="not a type for a cache") as caught:
        _context(_attention(), **_named(which, "q6_k"))
    assert caught.value.place == f"cache type of {which[-1].upper()}"
    assert caught.value.found == "q6_k"


@pytest.mark.parametrize("which", ["type_k", "type_v"])
def test_heads_that_are_no_whole_blocks_are_refused(which: str) -> None:
    attention = _attention(attention__key_length=24, attention__value_length=24)
    with pytest.raises(RequestError, match="not whole blocks") as caught:
        _context(attention, **_named(which, "q8_0"))
    assert (caught.value.expected, caught.value.found) == ("a multiple of 32", 48)


def test_quantised_values_need_flash_attention() -> None:
    with pytest.raises(RequestError, match="quantised values need flash attention"):
        _context(_attention(), type_v="q8_0", has_flash_attention=False)
    assert _context(_attention(), type_k="q8_0", has_flash_attention=False).length


@pytest.mark.parametrize(
    ("architecture", "pairs", "place", "found"),
    [
        ("qwen3moe", {"block_count": None}, "block_count", "no such key"),
        ("qwen3moe", {"block_count": 513}, "block_count", 513),
        ("qwen3moe", {"embedding_length": None}, "embedding_length", "no such key"),
        ("qwen3moe", {"attention__head_count": None}, "attention.head_count", "no such key"),
        ("qwen3moe", {"attention__head_count_kv": [1, 2]}, "attention.head_count_kv", "2"),
        ("mimo2", {"attention__sliding_window": 128}, "attention.sliding_window_pattern", None),
    ],
)
def test_metadata_that_does_not_say_what_it_must_is_named(
    architecture: str, pairs: Options, place: str, found: object
) -> None:
    with pytest.raises(SourceError, match="does not say what the context takes") as caught:
        _attention(architecture, **pairs)
    assert caught.value.place == f"key '{architecture}.{place}'"
    assert caught.value.found == (found or "no such key")


def test_of_a_pack_the_context_is_known_as_of_its_model(tmp_path: Path) -> None:
    source = first_shard("gpt-oss")
    pack_model([source], tmp_path / "whole")
    pack_model([source], tmp_path / "experts", experts_only=True)
    whole, experts = footprint_of(tmp_path / "whole"), footprint_of(tmp_path / "experts")
    options = ContextOptions(4096)
    assert whole == footprint_of(source)
    assert whole.context(options) == context_of(attention_of(open_source(source)), options)
    assert experts.context(options) is None
    assert experts.compute_length(options) is None
    assert experts.weights.expert_length == whole.weights.expert_length


def test_metadata_without_attention_is_no_reason_to_know_no_weights(tmp_path: Path) -> None:
    path = moe((0, 1)).write(tmp_path / "m.gguf")
    assert footprint_of(path).attention is None
    assert footprint_of(path).weights.length
