"""Which tensors hold experts, and where each expert's slices lie."""

import hashlib
from pathlib import Path

import pytest

from moepack.errors import SourceError
from moepack.shape import ModelShape
from moepack.source import experts
from moepack.source.experts import Experts
from moepack.source.shards import open_source
from tests.support.gguf_builder import F32, Q8_0, GgufBuilder, add_experts, moe
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, oracle


def experts_of(builder: GgufBuilder, folder: Path) -> Experts:
    return experts.find_experts(open_source([builder.write(folder / "model.gguf")]))


def refusal(builder: GgufBuilder, folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        experts_of(builder, folder)
    return str(caught.value)


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_slice_of_a_real_model_is_the_oracles(model: str) -> None:
    source = open_source([first_shard(model)])
    files = [Path(shard.path).read_bytes() for shard in source.shards]
    expected = oracle()[model]
    compared = 0
    for family in experts.find_experts(source).families:
        for part in family.parts:
            tensor = expected.pop(f"blk.{family.layer}.{part.name}")
            assert part.length == tensor["slice"]
            for expert, digest in enumerate(tensor["sha256_16"]):
                shard, offset = part.slices.at(expert)
                data = files[shard][offset : offset + part.length]
                assert hashlib.sha256(data).hexdigest()[:16] == digest
                compared += 1
    assert compared
    assert not expected


def shape(builder: GgufBuilder, folder: Path) -> ModelShape:
    source = open_source(builder.write(folder / "model.gguf"))
    return experts.shape_of(source, experts.find_experts(source))


def test_a_models_shape_is_what_its_tensors_and_its_metadata_say(tmp_path: Path) -> None:
    builder = moe((1, 2, 3), experts=6).put("qwen3moe.nextn_predict_layers", "u32", 1)
    of_model = shape(builder, tmp_path)
    assert of_model.layers == (1, 2, 3)
    assert of_model.expert_counts == {1: 6, 2: 6, 3: 6}
    assert of_model.routed[1].expert_length == 3 * 64 * 32 // 32 * 34
    assert (of_model.experts_used, of_model.mtp_layers) == (2, (3,))
    tensors = {spec.name: len(spec.data) for spec in builder.tensors}
    dense = sum(length for name, length in tensors.items() if "exps" not in name)
    assert of_model.dense_length == dense
    assert of_model.expert_length == sum(tensors.values()) - dense


def test_a_models_shape_has_all_families_and_how_many_of_each_a_token_uses(tmp_path: Path) -> None:
    builder = moe((0, 1)).put("qwen3moe.expert_used_count", "arr:u32", [3, 1])
    builder.put("qwen3moe.attention.value_expert_count", "u32", 6)
    builder.put("qwen3moe.attention.value_expert_used_count", "u32", 5)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 6), Q8_0, 68)
    families = shape(builder, tmp_path).families
    assert [(one.layer, one.name, one.expert_count, one.experts_used) for one in families] == [
        (0, "ffn_exps", 4, 3),
        (0, "attn_v_exps", 6, 5),
        (1, "ffn_exps", 4, 1),
    ]
    assert families[1].expert_length == 16 * 68
    builder.put("qwen3moe.expert_used_count", "arr:u32", [3])
    assert [family.experts_used for family in shape(builder, tmp_path).families] == [3, 5, None]


def test_deepseek4_has_layers_for_mtp_only_where_it_has_their_tensors(tmp_path: Path) -> None:
    builder = moe((0, 1, 2), architecture="deepseek4")
    builder.put("deepseek4.nextn_predict_layers", "u32", 1)
    assert shape(builder, tmp_path).mtp_layers == ()
    builder.tensor("blk.2.nextn.eh_proj.weight", (128, 64), F32, 512)
    assert shape(builder, tmp_path).mtp_layers == (2,)


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    assert experts_of(moe((1, 3, 6), block_count=8), tmp_path).layers == (1, 3, 6)


def test_types_and_shapes_may_differ_by_layer_and_within_one(tmp_path: Path) -> None:
    builder = moe((0,), block_count=2)
    add_experts(builder, 1, 4, (256, 64), 12, (256, 144), projections=("gate", "up"))
    builder.tensor("blk.1.ffn_down_exps.weight", (64, 256, 4), F32, 256)
    first, second = experts_of(builder, tmp_path).families
    assert {part.type_id for part in first.parts} == {Q8_0}
    assert {part.type_id: part.length for part in second.parts} == {12: 64 * 144, F32: 256 * 256}


def test_fused_gate_up_is_one_part(tmp_path: Path) -> None:
    builder = moe((), block_count=1)
    add_experts(builder, 0, 4, (64, 32), Q8_0, (32, 34), projections=("gate_up", "down"))
    parts = {part.name: part for part in experts_of(builder, tmp_path).families[0].parts}
    assert parts["ffn_gate_up_exps.weight"].shape == (64, 64)


def test_models_without_gate_are_sound(tmp_path: Path) -> None:
    builder = moe((), block_count=1)
    add_experts(builder, 0, 4, (64, 32), Q8_0, (32, 34), projections=("up", "down"))
    assert len(experts_of(builder, tmp_path).families[0].parts) == 2


def test_biases_and_scales_are_small_parts_of_the_same_blob(tmp_path: Path) -> None:
    builder = moe((0,))
    builder.tensor("blk.0.ffn_up_exps.bias", (32, 4), F32, 128)
    builder.tensor("blk.0.ffn_up_exps.scale", (4,), F32, 16)
    builder.tensor("blk.0.ffn_up_exps.input_scale", (4,), F32, 16)
    parts = {part.name: part for part in experts_of(builder, tmp_path).families[0].parts}
    assert parts["ffn_up_exps.bias"].length == 128
    assert parts["ffn_up_exps.bias"].shape == (32,)
    assert parts["ffn_up_exps.scale"].length == 4
    assert parts["ffn_up_exps.input_scale"].shape == ()


def test_nvfp4_experts_with_their_scales_are_sliced(tmp_path: Path) -> None:
    builder = moe((0,), type_id=40, block=(64, 36), ne=(64, 64))
    builder.tensor("blk.0.ffn_up_exps.scale", (4,), F32, 16)
    parts = {part.name: part for part in experts_of(builder, tmp_path).families[0].parts}
    assert parts["ffn_up_exps.weight"].length == 64 * 36


def test_chunk_experts_are_a_family_with_a_count_of_their_own(tmp_path: Path) -> None:
    builder = moe((0,), experts=8, architecture="grovemoe")
    builder.put("grovemoe.experts_per_group", "u32", 4)
    for name, dims in (("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64))):
        row = dims[0] // 32 * 34
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (*dims, 2), Q8_0, row)
    counts = {f.name: f.expert_count for f in experts_of(builder, tmp_path).families}
    assert counts == {"ffn_exps": 8, "ffn_chexps": 2}


def test_value_experts_are_a_family_of_their_own(tmp_path: Path) -> None:
    builder = moe((0,)).put("qwen3moe.attention.value_expert_count", "u32", 6)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 6), Q8_0, 68)
    families = experts_of(builder, tmp_path).families
    assert [(f.name, f.expert_count) for f in families] == [("ffn_exps", 4), ("attn_v_exps", 6)]


def legacy(experts_in: dict[int, int] | None = None) -> GgufBuilder:
    """Build a Mixtral of early 2024: a tensor for each expert (`experts_in`: type by expert)."""
    builder = moe((), architecture="llama", block_count=1).put("llama.expert_count", "u32", 4)
    for expert, type_id in (experts_in or dict.fromkeys((2, 0, 3, 1), F32)).items():
        for name in ("gate", "up", "down"):
            builder.tensor(f"blk.0.ffn_{name}.{expert}.weight", (32, 32), type_id, 128)
    return builder


def test_legacy_tensors_become_parts_of_their_expert(tmp_path: Path) -> None:
    path = legacy().write(tmp_path / "model.gguf")
    (family,) = experts.find_experts(open_source([path])).families
    part = next(part for part in family.parts if part.name == "ffn_up_exps.weight")
    data = path.read_bytes()
    tensors = {spec.name: spec.data for spec in legacy().tensors}
    for expert in range(4):
        _, offset = part.slices.at(expert)
        assert data[offset : offset + part.length] == tensors[f"blk.0.ffn_up.{expert}.weight"]


def test_a_missing_legacy_expert_is_named(tmp_path: Path) -> None:
    message = refusal(legacy(dict.fromkeys((0, 1, 3), F32)), tmp_path)
    assert "found no expert 2" in message


def test_legacy_experts_of_other_types_are_refused(tmp_path: Path) -> None:
    message = refusal(legacy({0: F32, 1: F32, 2: 26, 3: F32}), tmp_path)
    assert "blk.0.ffn_gate.2.weight" in message
    assert "another type or shape" in message


def test_legacy_and_stacked_tensors_of_one_part_are_refused(tmp_path: Path) -> None:
    builder = legacy()
    add_experts(builder, 0, 4, (32, 32), F32, (1, 4))
    assert "stands beside" in refusal(builder, tmp_path)


def test_look_alikes_are_left_alone(tmp_path: Path) -> None:
    builder = moe((0,))
    for name, dims in {
        "blk.0.ffn_norm_exps.weight": (4,),
        "blk.0.ffn_gate_inp.weight": (64, 4),
        "blk.0.exp_probs_b.bias": (4,),
        "blk.0.exp_probs_b": (4,),
        "blk.0.ffn_up_shexp.weight": (64, 32),
        "blk.0.ffn_gate_inp_shexp.weight": (64,),
        "blk.0.ssm_ba.weight": (64, 4),
    }.items():
        builder.tensor(name, dims, F32, 4 * dims[0])
    (family,) = experts_of(builder, tmp_path).families
    assert len(family.parts) == 3


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("blk.0.ffn_up_exps.weight.lora_a", (64, 32, 4), "looks like an expert tensor"),
        ("blk.0.ffn_side_exps.weight", (64, 32, 4), "looks like an expert tensor"),
        ("enc.blk.0.ffn_up_exps.weight", (64, 32, 4), "looks like an expert tensor"),
        ("blk.0.ffn_norm_exps.weight", (64, 4), "looks like an expert tensor"),
        ("blk.0.ffn_gate_up_exps.weight", (64, 32), "wrong number of dimensions"),
        ("blk.0.ffn_up_exps.bias", (4,), "wrong number of dimensions"),
        ("blk.0.ffn_up_exps.scale", (4, 4), "wrong number of dimensions"),
        ("blk.0.ffn_up_exps.scale", (5,), "expected 4, found 5"),
        ("blk.0.ffn_up_chexps.weight", (64, 32, 4), "a projection is missing"),
        ("blk.9.ffn_up_exps.weight", (64, 32, 4), "block_count of 1"),
    ],
)
def test_what_looks_like_an_expert_tensor_and_is_none_is_refused_by_name(
    tmp_path: Path, name: str, dims: tuple[int, ...], message: str
) -> None:
    text = refusal(moe((0,)).tensor(name, dims, F32, 4 * dims[0]), tmp_path)
    assert message in text
    assert name in text or "ffn_chexps" in text


def test_a_layer_without_down_is_refused(tmp_path: Path) -> None:
    builder = moe((), block_count=1)
    add_experts(builder, 0, 4, (64, 32), Q8_0, (32, 34), projections=("gate", "up"))
    assert "layer 0, ffn_exps: a projection is missing" in refusal(builder, tmp_path)


def test_parts_with_other_expert_counts_are_refused(tmp_path: Path) -> None:
    builder = moe((0,))
    builder.metadata = [pair for pair in builder.metadata if "expert_count" not in pair[0]]
    builder.tensor("blk.0.ffn_up_exps.bias", (32, 5), F32, 128)
    assert "other expert counts" in refusal(builder, tmp_path)


def test_dense_models_and_files_without_tensors_get_a_clear_word(tmp_path: Path) -> None:
    for name, word in (
        ("llama-dense-Q4_K_M-t12-00001-of-00002.gguf", "a dense model"),
        ("mixtral-vocab-only.gguf", "a GGUF without tensors"),
    ):
        with pytest.raises(SourceError, match=word) as caught:
            experts.find_experts(open_source([FIXTURES / name]))
        assert caught.value.hint


def test_an_unknown_type_is_taken_from_the_gap_and_marked(tmp_path: Path) -> None:
    """64 rows of 4 experts are 256 rows: only one row length fits a gap with 32 bytes of slack."""
    (family,) = experts_of(moe((0,), type_id=777, block=(64, 37), ne=(64, 64)), tmp_path).families
    part = next(part for part in family.parts if part.name == "ffn_up_exps.weight")
    assert part.inferred
    assert part.length == 64 * 37


def test_an_unknown_type_whose_gap_leaves_the_length_open_is_refused_by_name(
    tmp_path: Path,
) -> None:
    builder = moe((0,)).tensor("blk.0.ffn_up_exps.bias", (8, 4), 777, 9)
    message = refusal(builder, tmp_path)
    assert "blk.0.ffn_up_exps.bias" in message
    assert "type-777" in message


def test_unknown_types_of_dense_tensors_do_no_harm(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("blk.0.attn_q.weight", (8, 2), 777, 9)
    assert experts_of(builder, tmp_path).layers == (0,)


def test_types_with_one_scale_for_the_whole_tensor_are_refused(tmp_path: Path) -> None:
    builder = moe((), block_count=1)
    builder.tensor("blk.0.ffn_up_exps.weight", (64, 32, 4), 36, 16, tail=32)
    assert "I2_S has one scale for all experts" in refusal(builder, tmp_path)


def test_interleaved_rows_must_be_whole_groups_in_each_expert(tmp_path: Path) -> None:
    builder = moe((), block_count=1)
    builder.tensor("blk.0.ffn_up_exps.weight", (256, 6, 4), 212, 144)
    assert "whole groups of Q4_K_R4" in refusal(builder, tmp_path)


def test_per_layer_expert_counts_are_checked_by_layer(tmp_path: Path) -> None:
    builder = moe((), block_count=2).put("qwen3moe.expert_count", "arr:u32", [2, 4])
    add_experts(builder, 0, 2, (64, 32), Q8_0, (32, 34))
    add_experts(builder, 1, 4, (64, 32), Q8_0, (32, 34))
    assert [f.expert_count for f in experts_of(builder, tmp_path).families] == [2, 4]
    builder.put("qwen3moe.expert_count", "arr:u32", [2, 5])
    assert "expected 5, found 4" in refusal(builder, tmp_path)
