"""What a plan promises: alignment, no overlap, completeness, order, and little padding."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.errors import RequestError
from moepack.pack.format.contents import BlobKey
from moepack.packing.plan import layout, plan
from moepack.packing.plan.plan import Plan
from moepack.source.experts import Experts, SourceFamily, SourcePart
from moepack.source.ggml_types import TYPES
from tests.support.models import hotness_of

BY_NAME = {ggml_type.name: ggml_type for ggml_type in TYPES.values()}


def part(name: str, ne0: int, ne1: int, type_name: str) -> SourcePart:
    ggml_type = BY_NAME[type_name]
    length = ggml_type.tensor_length(ne0, ne1)
    return SourcePart(name, ggml_type.type_id, (ne0, ne1), length, False, ((0, 0),), length)


def up_and_down(ne0: int, ne1: int, family: str = "exps") -> list[SourcePart]:
    return [part(f"ffn_{name}_{family}.weight", ne0, ne1, "Q8_0") for name in ("up", "down")]


def bias(name: str, count: int) -> SourcePart:
    return SourcePart(name, 0, (count,), 4 * count, False, ((0, 0),), 4 * count)


def model(parts: Sequence[SourcePart], layers: Sequence[int] = (0,), count: int = 4) -> Experts:
    families = (SourceFamily(layer, "ffn_exps", count, tuple(parts)) for layer in layers)
    return Experts(tuple(families), frozenset())


class Published(NamedTuple):
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
# The larger an expert, the smaller the share of its padding: these are the smallest of each shape.
PUBLISHED = [
    Published("Qwen3-Next-80B", 2048, 512),
    Published("gpt-oss-120b", 2880, 2880, _SMALL_BLOCKS, _SMALL_BLOCKS, biased=True),
    Published("Nemotron-3-Nano-30B", 2688, 1856, _SMALL_BLOCKS, _SMALL_BLOCKS, gated=False),
    Published("Nemotron-3-Super-120B", 1024, 2688, _SMALL_BLOCKS, gated=False),
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


def test_scales_and_biases_of_one_blob_share_an_aligned_block() -> None:
    parts = published_parts(Published("", 2880, 2880, biased=True), "MXFP4", "MXFP4")
    scales = [
        SourcePart(f"ffn_{n}_exps.scale", 0, (), 4, False, ((0, 0),), 4) for n in ("up", "down")
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


def check_invariants(planned: Plan) -> None:
    """Parts fill each file without overlap, and each expert stands exactly once."""
    planned_blobs: list[BlobKey] = []
    for file in planned.files:
        position = 0
        for extent in planned.extents(file):
            assert extent.offset >= position
            position = extent.end
        assert position <= file.length
        planned_blobs += file.blobs
    expected = [
        (number, expert)
        for number, template in enumerate(planned.templates)
        for expert in range(template.family.expert_count)
    ]
    assert sorted(planned_blobs) == expected == sorted(planned.order)
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
        parts = up_and_down(32 * width, 3)
        families.append(
            SourceFamily(layer, "ffn_exps", experts, (*parts, bias("ffn_up_exps.bias", width)))
        )
    planned = plan.make(
        Experts(tuple(families), frozenset()), layout.load(name), hotness=hotness_of(counts)
    )
    check_invariants(planned)
    ranked = [planned.counts.get(blob, -1) for blob in planned.order]
    assert ranked == sorted(ranked, reverse=True)


def test_hot_first_puts_the_hottest_of_all_layers_first_in_capped_files() -> None:
    parts = up_and_down(256, 64)
    counts = {(layer, expert): 10 * expert + layer for layer in (0, 1) for expert in range(8)}
    chosen = replace(layout.load("hot-first"), max_length=256 << 10)
    planned = plan.make(model(parts, (0, 1), 8), chosen, hotness=hotness_of(counts))
    check_invariants(planned)
    assert len(planned.files) > 1
    assert all(file.length <= 256 << 10 for file in planned.files)
    on_disk = [(blob.template, blob.expert) for file in planned.files for blob in file.blobs]
    assert on_disk[:3] == [(1, 7), (0, 7), (1, 6)]
    assert on_disk == list(planned.order)


def test_layers_sorts_within_each_file_only() -> None:
    parts = up_and_down(64, 8)
    counts = {(0, 0): 1, (0, 1): 9, (1, 0): 50, (1, 1): 5}
    planned = plan.make(model(parts, (0, 1), 2), layout.load("layers"), hotness=hotness_of(counts))
    assert [file.name for file in planned.files] == ["experts-00000.bin", "experts-00001.bin"]
    assert [[blob.expert for blob in file.blobs] for file in planned.files] == [[1, 0], [0, 1]]
    assert planned.order == ((1, 0), (0, 1), (1, 1), (0, 0))


def test_without_hotness_the_order_is_the_sources() -> None:
    parts = up_and_down(64, 8)
    planned = plan.make(model(parts, (0, 1), 3), layout.load("hot-first"))
    assert list(planned.order) == [(layer, expert) for layer in (0, 1) for expert in range(3)]
    assert not any(template.hotness_measured for template in planned.templates)


def test_a_layer_that_was_not_measured_comes_last_and_says_so() -> None:
    parts = up_and_down(64, 8)
    planned = plan.make(
        model(parts, (0, 1), 2), layout.load("hot-first"), hotness=hotness_of({(1, 0): 0})
    )
    assert planned.order == ((1, 0), (1, 1), (0, 0), (0, 1))
    assert [template.hotness_measured for template in planned.templates] == [False, True]


def test_a_chunk_is_as_hot_as_the_experts_it_serves() -> None:
    families = (
        SourceFamily(0, "ffn_exps", 4, tuple(up_and_down(64, 8))),
        SourceFamily(0, "ffn_chexps", 2, tuple(up_and_down(64, 8, "chexps"))),
    )
    counts = {(0, 0): 1, (0, 1): 2, (0, 2): 30, (0, 3): 4}
    planned = plan.make(
        Experts(families, frozenset()), layout.load("layers"), hotness=hotness_of(counts)
    )
    assert planned.counts[BlobKey(1, 0)] == 3
    assert planned.counts[BlobKey(1, 1)] == 34


def test_only_the_layers_asked_for_are_planned() -> None:
    parts = up_and_down(64, 8)
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
