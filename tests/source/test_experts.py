"""Which tensors hold experts, and where each expert's slices lie."""

from pathlib import Path

import pytest

from moepack.common.errors import SourceError
from moepack.common.shape import ModelShape
from moepack.source import experts
from moepack.source.experts import Experts, SourcePart
from moepack.source.shards import open_source
from tests.support.gguf_builder import F32, Q8_0, GgufBuilder, add_experts, moe


def experts_of(builder: GgufBuilder, folder: Path) -> Experts:
    return experts.find_experts(open_source([builder.write(folder / "model.gguf")]))


def parts_of(builder: GgufBuilder, folder: Path) -> dict[str, SourcePart]:
    """Return the parts of the only family of experts, by their names."""
    (family,) = experts_of(builder, folder).families
    return {part.name: part for part in family.parts}


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


@pytest.mark.parametrize(("first", "shape"), [("gate_up", (64, 64)), ("up", (64, 32))])
def test_projections_may_be_fused_or_lack_a_gate(
    first: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    builder = moe((), block_count=1)
    add_experts(builder, 0, 4, (64, 32), Q8_0, (32, 34), projections=(first, "down"))
    parts = parts_of(builder, tmp_path)
    assert len(parts) == 2
    assert parts[f"ffn_{first}_exps.weight"].shape == shape


def test_biases_and_scales_are_small_parts_of_the_same_blob(tmp_path: Path) -> None:
    builder = moe((0,), type_id=40, block=(64, 36), ne=(64, 64))
    builder.tensor("blk.0.ffn_up_exps.bias", (32, 4), F32, 128)
    builder.tensor("blk.0.ffn_up_exps.scale", (4,), F32, 16)
    builder.tensor("blk.0.ffn_up_exps.input_scale", (4,), F32, 16)
    parts = parts_of(builder, tmp_path)
    assert parts["ffn_up_exps.weight"].length == 64 * 36
    assert (parts["ffn_up_exps.bias"].length, parts["ffn_up_exps.bias"].shape) == (128, (32,))
    assert parts["ffn_up_exps.scale"].length == 4
    assert parts["ffn_up_exps.input_scale"].shape == ()


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
    assert len(parts_of(builder, tmp_path)) == 3


def test_per_layer_expert_counts_are_checked_by_layer(tmp_path: Path) -> None:
    builder = moe((), block_count=2).put("qwen3moe.expert_count", "arr:u32", [2, 4])
    add_experts(builder, 0, 2, (64, 32), Q8_0, (32, 34))
    add_experts(builder, 1, 4, (64, 32), Q8_0, (32, 34))
    assert [f.expert_count for f in experts_of(builder, tmp_path).families] == [2, 4]
    builder.put("qwen3moe.expert_count", "arr:u32", [2, 5])
    with pytest.raises(SourceError, match="expected 5, found 4"):
        experts_of(builder, tmp_path)
