"""The verifier's own reading of shards, and its table of block sizes."""

from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moepack.common.errors import SourceError
from moepack.pack.verifying.block_sizes import BLOCK_SIZES
from moepack.pack.verifying.witness import read_shards
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts
from moepack.source.shards import open_source
from tests.support.gguf_builder import F32, VALUE_TYPES, moe
from tests.support.models import REAL_MODELS, first_shard

WRONG_IN_GGUF = {GGMLQuantizationType.Q8_1}
"""gguf 0.19.0 says 40 bytes a block, ggml.c has 36."""
NEWER_THAN_GGUF = {42}
"""Q2_0 of llama.cpp b11549."""
OF_FORKS = {31, 32, 33, 36, *range(97, 400)}


def test_the_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {
        kind: (kind.name, *GGML_QUANT_SIZES[kind])
        for kind in GGMLQuantizationType
        if kind not in WRONG_IN_GGUF
    }
    ours = {
        number: size[:3]
        for number, size in BLOCK_SIZES.items()
        if number not in WRONG_IN_GGUF | NEWER_THAN_GGUF and number not in OF_FORKS
    }
    assert ours == theirs


@pytest.mark.parametrize("model", REAL_MODELS)
def test_both_ways_to_the_bytes_lead_to_the_same_places(model: str) -> None:
    source = open_source([first_shard(model)])
    witness = read_shards([shard.path for shard in source.shards])
    model_experts = find_experts(source)
    for family in model_experts.families:
        for part in family.parts:
            slices = witness.parts[family.layer, part.name]
            assert (slices.type_id, slices.shape) == (part.type_id, part.shape)
            experts = range(family.expert_count)
            assert slices.places == [part.at(expert) for expert in experts]
    dense = {
        tensor.name: (tensor.dims, tensor.type_id, tensor.offset, tensor.length, shard)
        for shard, tensor in find_dense(source, model_experts).tensors
    }
    assert {name: (*walked[1:5], walked.shard) for name, walked in witness.dense.items()} == dense
    headers = [shard.header_length for shard in witness.shards]
    assert headers == [shard.data_offset for shard in source.shards]
    assert witness.shards[0].texts["general.name"] == source.value("general.name")


def test_metadata_of_all_types_is_stepped_over(tmp_path: Path) -> None:
    builder = moe((0,))
    for kind in VALUE_TYPES:
        builder.put(f"one.{kind}", kind, 1).put(f"some.{kind}", f"arr:{kind}", [1, 0, 1])
    builder.put("some.texts", "arr:str", ["a", "bc"]).put("a.long.text", "str", "n" * 201)
    builder.put("a.text", "str", "n" * 200)
    path = builder.write(tmp_path / "m.gguf")
    (walked,) = read_shards([str(path)]).shards
    source = open_source([path]).shards[0]
    assert walked.header_length == source.data_offset
    assert [one.start for one in walked.tensors] == [one.offset for one in source.tensors]
    assert (walked.numbers["one.u16"], walked.numbers["one.u32"]) == (1, 1)
    assert walked.texts["a.text"] == "n" * 200
    assert "a.long.text" not in walked.texts


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(SourceError) as caught:
        read_shards([str(tmp_path / "m.gguf")])
    assert caught.value.hint


def test_a_norm_before_the_experts_is_dense(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("blk.0.ffn_norm_exps.weight", (64,), F32, 256)
    path = builder.write(tmp_path / "m.gguf")
    source = open_source([path])
    names = {tensor.name for _, tensor in find_dense(source, find_experts(source)).tensors}
    assert set(read_shards([str(path)]).dense) == names
    assert "blk.0.ffn_norm_exps.weight" in names


@pytest.mark.parametrize(
    ("dims", "row_length", "words"),
    [((0, 2, 4), 0, "an empty tensor"), ((32, 1, 3), 10, "its length is open")],
)
def test_expert_tensors_that_leave_their_length_open_are_refused(
    dims: tuple[int, ...], row_length: int, words: str, tmp_path: Path
) -> None:
    type_id = 999 if row_length else F32
    builder = moe((0,)).tensor("blk.0.ffn_gate_up_exps.weight", dims, type_id, row_length)
    path = builder.tensor("last.weight", (4,), F32, 16).write(tmp_path / "m.gguf")
    with pytest.raises(SourceError, match=words):
        read_shards([str(path)])


def test_a_length_that_does_not_fill_its_gap_is_refused(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("blk.0.x.weight", (8,), F32, 128)
    path = builder.tensor("last.weight", (4,), F32, 16).write(tmp_path / "m.gguf")
    with pytest.raises(SourceError, match=r"block sizes do not fit the gap, expected 32 bytes"):
        read_shards([str(path)])


def test_a_dense_tensor_of_an_unknown_type_takes_its_gap(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("blk.0.x.weight", (8, 3), 999, 30)
    builder.tensor("empty.weight", (0,), F32, 0)
    path = builder.tensor("last.weight", (4,), F32, 16).write(tmp_path / "m.gguf")
    witness = read_shards([str(path)])
    source = open_source([path])
    lengths = {tensor.name: tensor.length for _, tensor in source.tensors()}
    for name in ("blk.0.x.weight", "empty.weight", "last.weight"):
        assert witness.dense[name].length == lengths[name]
