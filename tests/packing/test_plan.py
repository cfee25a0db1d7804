"""What a plan promises: alignment, no overlap, completeness, order, and little padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.errors import RequestError
from moepack.packing import layout, plan
from moepack.packing.layout import Layout
from moepack.packing.plan import BlobKey, Plan
from moepack.sizes import parse_size
from moepack.source.experts import Experts, SourceFamily, SourcePart, Stacked
from moepack.source.ggml_types import TYPES
from tests.support.models import hotness_of

BY_NAME = {known.name: known for known in TYPES.values()}


def part(name: str, ne0: int, ne1: int, type_name: str) -> SourcePart:
    known = BY_NAME[type_name]
    length = known.tensor_length(ne0, ne1)
    return SourcePart(name, known.type_id, (ne0, ne1), length, False, Stacked(0, 0, length))


def bias(name: str, count: int) -> SourcePart:
    return SourcePart(name, 0, (count,), 4 * count, False, Stacked(0, 0, 4 * count))


def model(parts: Sequence[SourcePart], layers: Sequence[int] = (0,), count: int = 4) -> Experts:
    families = (SourceFamily(layer, "ffn_exps", count, tuple(parts)) for layer in layers)
    return Experts(tuple(families), frozenset())


@dataclass(frozen=True)
class Published:
    """A published model: ne0 of gate and up, their rows, and the types its files come in."""

    name: str
    ne0: int
    n_ff: int
    down_types: tuple[str, ...] = ("Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "Q8_0")
    up_types: tuple[str, ...] = ("Q4_K", "IQ4_XS", "MXFP4", "Q8_0", "Q2_K", "IQ1_S", "IQ2_XXS")
    gated: bool = True
    biased: bool = False


_SMALL_BLOCKS = ("Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
# Dimensions as published; a width that 256 does not divide falls back to types with blocks of 32.
PUBLISHED = [
    Published("Qwen3-30B-A3B", 2048, 768),
    Published("Qwen3-235B-A22B", 4096, 1536),
    Published("Qwen3-Coder-480B-A35B", 6144, 2560),
    Published("Qwen3-Next-80B", 2048, 512),
    Published("Qwen3.5-35B-A3B", 2048, 512),
    Published("Qwen3.5-122B-A10B", 3072, 1024),
    Published("Qwen3.5-397B-A17B", 4096, 1024),
    Published("DeepSeek-V2-Lite", 2048, 1408, _SMALL_BLOCKS),
    Published("DeepSeek-V2", 5120, 1536),
    Published("DeepSeek-V3", 7168, 2048),
    Published("DeepSeek-V4-Flash", 4096, 2048),
    Published("GLM-4.5-Air", 4096, 1408, _SMALL_BLOCKS),
    Published("GLM-4.5", 5120, 1536),
    Published("GLM-4.7-Flash", 2048, 1536),
    Published("GLM-5", 6144, 2048),
    Published("gpt-oss-20b", 2880, 2880, _SMALL_BLOCKS, _SMALL_BLOCKS, biased=True),
    Published("gpt-oss-120b", 2880, 2880, _SMALL_BLOCKS, _SMALL_BLOCKS, biased=True),
    Published("Kimi-K2", 7168, 2048),
    Published("Kimi-K3", 3584, 3072),
    Published("MiniMax-M2", 3072, 1536),
    Published("Llama-4-Scout", 5120, 8192),
    Published("Llama-4-Maverick", 5120, 8192),
    Published("Mixtral-8x7B", 4096, 14336),
    Published("Mixtral-8x22B", 6144, 16384),
    Published("Grok-1", 6144, 32768),
    Published("DBRX", 6144, 10752),
    Published("Arctic", 7168, 4864),
    Published("OLMoE-1B-7B", 2048, 1024),
    Published("Phi-3.5-MoE", 4096, 6400),
    Published("dots.llm1", 4096, 1408, _SMALL_BLOCKS),
    Published("ERNIE-4.5-300B-A47B", 8192, 3584),
    Published("ERNIE-4.5-21B-A3B", 2560, 1536),
    Published("Hunyuan-A13B", 4096, 3072),
    Published("Ling-1T", 8192, 2048),
    Published("Nemotron-3-Nano-30B", 2688, 1856, _SMALL_BLOCKS, _SMALL_BLOCKS, gated=False),
    Published("Nemotron-3-Super-120B", 1024, 2688, _SMALL_BLOCKS, gated=False),
    Published("Step-3.5-Flash", 4096, 1280),
    Published("MiMo-V2-Flash", 4096, 2048),
    Published("LFM2-8B-A1B", 2048, 1792),
    Published("Granite-4.0-H-Small", 4096, 768),
    Published("GroveMoE", 2048, 768),
    Published("Gemma-4-26B-A4B", 2816, 704, _SMALL_BLOCKS),
]


def published_parts(shape: Published, up_type: str, down_type: str) -> list[SourcePart]:
    names = ("gate", "up") if shape.gated else ("up",)
    parts = [part(f"ffn_{name}_exps.weight", shape.ne0, shape.n_ff, up_type) for name in names]
    parts.append(part("ffn_down_exps.weight", shape.n_ff, shape.ne0, down_type))
    if shape.biased:
        parts += [bias(f"ffn_{name}_exps.bias", shape.n_ff) for name in names]
        parts.append(bias("ffn_down_exps.bias", shape.ne0))
    return parts


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_padding_stays_under_one_percent_for_every_published_model(shape: Published) -> None:
    for up_type in shape.up_types:
        for down_type in shape.down_types:
            parts = published_parts(shape, up_type, down_type)
            planned = plan.make(model(parts), layout.load("layers"))
            padding = planned.data_length - planned.payload_length
            assert padding < 0.01 * planned.data_length, (up_type, down_type)


@pytest.mark.parametrize(
    ("ne0", "n_ff", "length"),
    [(2048, 768, 2_654_208), (7168, 2048, 24_772_608), (4096, 1024, 7_077_888)],
)
def test_the_dimensions_give_the_known_lengths(ne0: int, n_ff: int, length: int) -> None:
    """Bytes of one expert at Q4_K, as published traces and tables state them."""
    parts = published_parts(Published("", ne0, n_ff), "Q4_K", "Q4_K")
    assert sum(each.length for each in parts) == length


def test_scales_and_biases_of_one_blob_share_an_aligned_block() -> None:
    parts = published_parts(Published("", 2880, 2880, biased=True), "MXFP4", "MXFP4")
    scales = [
        SourcePart(f"ffn_{n}_exps.scale", 0, (), 4, False, Stacked(0, 0, 4)) for n in ("up", "down")
    ]
    (template,) = plan.make(model([*parts, *scales]), layout.load("layers")).templates
    small = [
        (offset, each.length)
        for each, offset in zip(template.parts, template.offsets_in_blob, strict=True)
        if not each.is_weight
    ]
    assert len(small) == 5
    first, last = small[0][0], small[-1][0] + small[-1][1]
    assert first % 4096 == 0
    assert all(offset % 64 == 0 for offset, _ in small)
    assert last - first < sum(length for _, length in small) + 64 * len(small)


def test_parts_stand_in_the_layouts_order_and_small_ones_last() -> None:
    parts = published_parts(Published("", 64, 64, biased=True), "F32", "F32")
    (template,) = plan.make(model(parts[::-1]), layout.load("layers")).templates
    names = [each.name.removeprefix("ffn_").replace("_exps", "") for each in template.parts]
    weights, biases = names[:3], names[3:]
    assert weights == ["gate.weight", "up.weight", "down.weight"]
    assert biases == ["gate.bias", "up.bias", "down.bias"]


def custom(folder: Path, alignment: str, small: str = "64", group: str = "layer") -> Layout:
    limit = 'max_length = "256 KiB"' if group == "size" else ""
    name = "{layer}" if group == "layer" else "{number}"
    path = folder / "custom.toml"
    path.write_text(
        f'description = "for a test"\n[files]\ngroup = "{group}"\nname = "e-{name}.bin"\n{limit}\n'
        f'[blobs]\norder = "hotness"\nalignment = "{alignment}"\n'
        f'[parts]\nprojections = ["gate_up", "gate", "up", "down", "attn_v"]\n'
        f'alignment = "{alignment}"\nsmall_alignment = {small}\n'
        f'[dense]\nalignment = "{alignment}"\n'
    )
    return layout.load(str(path))


@pytest.mark.parametrize("alignment", ["4 KiB", "16 KiB", "64 KiB", "2 MiB"])
def test_all_alignments_that_machines_have_are_possible(tmp_path: Path, alignment: str) -> None:
    parts = published_parts(Published("", 2880, 2880, biased=True), "MXFP4", "MXFP4")
    planned = plan.make(model(parts), custom(tmp_path, alignment))
    size = parse_size(alignment)
    (template,) = planned.templates
    for each, offset in zip(template.parts, template.offsets_in_blob, strict=True):
        assert not each.is_weight or offset % size == 0
    assert all(blob.offset % size == 0 for file in planned.files for blob in file.blobs)
    assert all(file.length % size == 0 for file in planned.files)


def check_invariants(planned: Plan) -> None:
    """Blobs fill each file without overlap, and each expert stands exactly once."""
    seen = []
    for file in planned.files:
        position = 0
        for blob in file.blobs:
            assert blob.offset == position
            position += planned.templates[blob.template].length
            seen.append((blob.template, blob.expert))
        assert position == file.length
    expected = [
        (number, expert)
        for number, template in enumerate(planned.templates)
        for expert in range(template.family.expert_count)
    ]
    assert sorted(seen) == expected == sorted(planned.order)
    for template in planned.templates:
        end = 0
        for each, offset in zip(template.parts, template.offsets_in_blob, strict=True):
            assert offset >= end
            end = offset + each.length
        assert end <= template.length


@settings(deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    experts=st.integers(1, 9),
    counts=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 8)), st.integers(0, 9)),
    name=st.sampled_from(["layers", "hot-first"]),
)
def test_every_plan_is_complete_and_without_overlap(
    widths: list[int], experts: int, counts: dict[tuple[int, int], int], name: str
) -> None:
    families = []
    for layer, width in enumerate(widths):
        parts = [part(f"ffn_{n}_exps.weight", 32 * width, 3, "Q8_0") for n in ("up", "down")]
        families.append(
            SourceFamily(layer, "ffn_exps", experts, (*parts, bias("ffn_up_exps.bias", width)))
        )
    planned = plan.make(
        Experts(tuple(families), frozenset()), layout.load(name), hotness=hotness_of(counts)
    )
    check_invariants(planned)
    ranked = [planned.counts.get(blob, -1) for blob in planned.order]
    assert ranked == sorted(ranked, reverse=True)


def test_hot_first_puts_the_hottest_of_all_layers_first_in_capped_files(tmp_path: Path) -> None:
    parts = [part(f"ffn_{name}_exps.weight", 256, 64, "Q8_0") for name in ("up", "down")]
    counts = {(layer, expert): 10 * expert + layer for layer in (0, 1) for expert in range(8)}
    chosen = custom(tmp_path, "4 KiB", group="size")
    planned = plan.make(model(parts, (0, 1), 8), chosen, hotness=hotness_of(counts))
    check_invariants(planned)
    assert len(planned.files) > 1
    assert all(file.length <= 256 << 10 for file in planned.files)
    on_disk = [(blob.template, blob.expert) for file in planned.files for blob in file.blobs]
    assert on_disk[:3] == [(1, 7), (0, 7), (1, 6)]
    assert on_disk == list(planned.order)


def test_layers_sorts_within_each_file_only() -> None:
    parts = [part(f"ffn_{name}_exps.weight", 64, 8, "Q8_0") for name in ("up", "down")]
    counts = {(0, 0): 1, (0, 1): 9, (1, 0): 50, (1, 1): 5}
    planned = plan.make(model(parts, (0, 1), 2), layout.load("layers"), hotness=hotness_of(counts))
    assert [file.name for file in planned.files] == ["experts-00000.bin", "experts-00001.bin"]
    assert [[blob.expert for blob in file.blobs] for file in planned.files] == [[1, 0], [0, 1]]
    assert planned.order == ((1, 0), (0, 1), (1, 1), (0, 0))


def test_without_hotness_the_order_is_the_sources() -> None:
    parts = [part(f"ffn_{name}_exps.weight", 64, 8, "Q8_0") for name in ("up", "down")]
    planned = plan.make(model(parts, (0, 1), 3), layout.load("hot-first"))
    assert list(planned.order) == [(layer, expert) for layer in (0, 1) for expert in range(3)]
    assert not any(template.hotness_measured for template in planned.templates)


def test_a_layer_that_was_not_measured_comes_last_and_says_so() -> None:
    parts = [part(f"ffn_{name}_exps.weight", 64, 8, "Q8_0") for name in ("up", "down")]
    planned = plan.make(
        model(parts, (0, 1), 2), layout.load("hot-first"), hotness=hotness_of({(1, 0): 0})
    )
    assert planned.order == ((1, 0), (1, 1), (0, 0), (0, 1))
    assert [template.hotness_measured for template in planned.templates] == [False, True]


def test_a_chunk_is_as_hot_as_the_experts_it_serves() -> None:
    up, down = (part(f"ffn_{name}_exps.weight", 64, 8, "Q8_0") for name in ("up", "down"))
    chunk = [part(f"ffn_{name}_chexps.weight", 64, 8, "Q8_0") for name in ("up", "down")]
    families = (
        SourceFamily(0, "ffn_exps", 4, (up, down)),
        SourceFamily(0, "ffn_chexps", 2, tuple(chunk)),
    )
    counts = {(0, 0): 1, (0, 1): 2, (0, 2): 30, (0, 3): 4}
    planned = plan.make(
        Experts(families, frozenset()), layout.load("layers"), hotness=hotness_of(counts)
    )
    assert planned.counts[BlobKey(1, 0)] == 3
    assert planned.counts[BlobKey(1, 1)] == 34


def test_only_the_layers_asked_for_are_planned() -> None:
    parts = [part(f"ffn_{name}_exps.weight", 64, 8, "Q8_0") for name in ("up", "down")]
    planned = plan.make(model(parts, (0, 1, 4), 2), layout.load("layers"), layers=[1, 4])
    assert [template.family.layer for template in planned.templates] == [1, 4]
    with pytest.raises(RequestError, match="layer 2 has no experts"):
        plan.make(model(parts, (0, 1, 4), 2), layout.load("layers"), layers=[2])


def test_the_index_has_room_for_todays_largest_model() -> None:
    """Kimi-K3: 92 layers of 896 experts; the index stays small enough to be mapped at once."""
    parts = published_parts(Published("", 3584, 3072), "Q4_K", "Q6_K")
    planned = plan.make(model(parts, range(1, 93), 896), layout.load("layers"))
    assert len(planned.order) == 82_432
    assert planned.index_length < 12 << 20
    assert math.isclose(planned.data_length, 82_432 * 21_417_984, rel_tol=1e-3)
