"""What weights take, held against llama.cpp, the gguf package and published numbers."""

import re
import shutil
from collections import Counter
from pathlib import Path

import gguf
import pytest

from moepack import digest
from moepack.engines.source_header import source_of
from moepack.errors import PackError
from moepack.footprint.weights import LayerWeights, Weights, weights_of
from moepack.packing.shard_index import index_model
from moepack.reading.pack import Pack
from tests.support import architectures, large_models, llama_cpp_memory
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.models import REAL_MODELS, first_shard, pack_model, shards_of
from tests.support.needs import needs_llama
from tests.support.pack_draft import Draft

_PADDING = 32
"""What llama.cpp rounds each tensor up to, in bytes, where it does not map the file."""


@pytest.mark.parametrize("model", REAL_MODELS)
def test_each_layer_takes_what_the_gguf_package_counts(model: str) -> None:
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for path in shards_of(model):
        for tensor in gguf.GGUFReader(path).tensors:
            match = re.match(r"blk\.(\d+)\.", tensor.name)
            kind = experts if "_exps." in tensor.name else dense
            kind[match[1] if match else tensor.name] += int(tensor.n_bytes)
    weights = weights_of(first_shard(model))
    found = {str(held.layer): (held.dense_length, held.expert_length) for held in weights.layers}
    assert found == {layer: (dense[layer], experts[layer]) for layer in found}
    assert len(found) == weights.block_count
    assert weights.length == dense.total() + experts.total()
    assert weights.outer is not None
    assert weights.outer.embedding_length == dense["token_embd.weight"]
    assert weights.outer.output_length == dense["output.weight"]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_pack_of_a_model_says_what_the_model_says(model: str, packs: dict[str, Path]) -> None:
    assert weights_of(packs[model]) == weights_of(first_shard(model))


def test_an_index_over_shards_says_what_the_model_says(tmp_path: Path) -> None:
    index_model(first_shard("deepseek2"), tmp_path / "index")
    assert weights_of(tmp_path / "index") == weights_of(first_shard("deepseek2"))


def test_of_a_pack_of_experts_alone_no_more_than_these_is_known(tmp_path: Path) -> None:
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", experts_only=True)
    weights, whole = weights_of(tmp_path / "pack"), weights_of(first_shard("qwen3moe"))
    assert weights == Weights(
        architecture="qwen3moe",
        name=whole.name,
        block_count=None,
        layers=tuple(held._replace(dense_length=None) for held in whole.layers),
        outer=None,
        mtp_length=None,
        loaded_mtp_length=None,
        shape=whole.shape._replace(dense_length=None),
        parameters=None,
    )
    assert weights.dense_length is weights.length is weights.read_dense_length is None
    assert weights.expert_length == whole.expert_length
    assert weights.read_expert_length == whole.read_expert_length


def test_a_token_reads_one_row_of_embeddings_and_the_experts_that_it_uses(tmp_path: Path) -> None:
    weights = weights_of(moe((1, 2), experts=4).write(tmp_path / "m.gguf"))
    one_expert = 3 * (32 * 64 // 32 * 34)
    assert weights.layers == (
        LayerWeights(0, 4 * 64, 0, 0),
        LayerWeights(1, 4 * 64, 4 * one_expert, 2 * one_expert),
        LayerWeights(2, 4 * 64, 4 * one_expert, 2 * one_expert),
    )
    assert weights.read_expert_length == 4 * one_expert
    # 8 words and no output of its own: the embedding is that, and is read whole besides one row.
    norms = 4 * 4 * 64
    assert weights.dense_length == 8 * 4 * 64 + norms
    assert weights.read_dense_length == 4 * 64 + 8 * 4 * 64 + norms
    assert weights.outer is not None
    assert weights.outer.is_tied
    assert weights.parameters is not None
    assert weights.parameters.embedding == 0


def test_what_a_token_uses_is_unknown_where_the_metadata_does_not_say(tmp_path: Path) -> None:
    builder = moe((0,))
    builder.metadata = [pair for pair in builder.metadata if "used" not in pair[0]]
    weights = weights_of(builder.write(tmp_path / "m.gguf"))
    assert weights.layers[0].used_expert_length is None
    assert weights.parameters is not None
    assert weights.read_expert_length is weights.parameters.active is None
    assert weights.read_dense_length is not None


@needs_llama
def test_gpt_oss_120b_is_as_large_as_published(tmp_path: Path) -> None:
    path = large_models.write("gpt-oss-120b", tmp_path / "m.gguf")
    weights = weights_of(path)
    parameters = weights.parameters
    assert parameters is not None
    assert parameters.active is not None
    counts = {(family.expert_count, family.experts_used) for family in weights.shape.families}
    assert (weights.block_count, counts) == (36, {(128, 4)})
    assert parameters.total / 1e9 == pytest.approx(116.8, abs=0.05)
    assert parameters.expert / 1e9 == pytest.approx(114.7, abs=0.05)
    assert parameters.expert / (36 * 128) / 1e6 == pytest.approx(24.9, abs=0.05)
    assert parameters.active / 1e9 == pytest.approx(5.1, abs=0.05)
    assert parameters.dense / 1e9 == pytest.approx(1.5, abs=0.05)
    # An expert: three matrices in MXFP4 (17 bytes for 32) with their biases.
    assert {family.expert_length for family in weights.shape.families} == {
        3 * (2880 * 2880 // 32 * 17 + 4 * 2880)
    }


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", large_models.MODELS)
def test_a_large_model_takes_what_llama_cpp_says(model: str, tmp_path: Path) -> None:
    path = large_models.write(model, tmp_path / "m.gguf")
    _compare(path)


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("model", architectures.MODELS)
def test_each_architecture_takes_what_llama_cpp_says(model: str, tmp_path: Path) -> None:
    _compare(architectures.write(model, tmp_path / "m.gguf", has_weights=False))


@needs_llama
def test_an_output_that_is_the_embedding_is_in_memory_once(tmp_path: Path) -> None:
    path = large_models.write("Qwen3-30B-A3B", tmp_path / "m.gguf", without="^output.weight")
    weights = weights_of(path)
    assert weights.outer is not None
    assert weights.outer.is_tied
    assert weights.outer.output_length == weights.outer.embedding_length
    _compare(path)


def _compare(path: Path) -> None:
    weights = weights_of(path)
    assert weights.length is not None
    assert weights.mtp_length is not None
    assert weights.loaded_mtp_length is not None
    tensors = gguf.GGUFReader(path).tensors
    in_file = sum(int(tensor.n_bytes) for tensor in tensors)
    assert in_file == weights.length - weights.loaded_mtp_length + weights.mtp_length
    padding = llama_cpp_memory.memory_of(path, n_ctx=256).model - weights.length
    assert 0 <= padding < _PADDING * len(tensors)


def test_layers_for_prediction_are_in_the_file_and_not_run(tmp_path: Path) -> None:
    builder = moe((0, 1, 2), block_count=3)
    builder.put("qwen3moe.nextn_predict_layers", "u32", 1)
    weights = weights_of(builder.write(tmp_path / "m.gguf"))
    assert weights.block_count == 2
    assert [held.layer for held in weights.layers] == [0, 1]
    assert weights.shape.mtp_layers == (2,)
    last = weights.layers[1]
    assert weights.mtp_length == (last.dense_length or 0) + last.expert_length
    assert weights.loaded_mtp_length == 0


def test_a_pack_knows_the_headers_of_all_shards(tmp_path: Path) -> None:
    shards = write_shards(split(moe(), 4), tmp_path)
    pack_model(shards[:1], tmp_path / "pack")
    with Pack(tmp_path / "pack") as pack:
        found = source_of(pack)
    assert [len(shard.tensors) for shard in found.shards] == [4, 4, 4, 2]


def test_a_damaged_header_in_a_pack_is_named_with_its_shard(tmp_path: Path) -> None:
    shards = write_shards(split(moe(), 4), tmp_path)
    pack_model(shards[:1], tmp_path / "pack")
    draft = Draft(shutil.copytree(tmp_path / "pack", tmp_path / "damaged"))
    held = draft.get("shard_bytes", 2)
    draft.set("shard_bytes", 2, digest=held.digest ^ 1)
    draft.save()
    with pytest.raises(PackError) as caught:
        weights_of(draft.path)
    assert caught.value.place == f"header of shard 3 at byte {held.offset:,}"
    assert caught.value.found == digest.to_text(held.digest)
