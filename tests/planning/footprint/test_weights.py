"""The bytes of weights, against the gguf package and published numbers."""

import re
from collections import Counter
from pathlib import Path

import gguf
import pytest

from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import footprint_of
from moepack.planning.footprint.weights import Weights
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, first_shard, pack_model, shards_of
from tests.support.values import some


@pytest.mark.parametrize("model", REAL_MODELS)
def test_each_layer_takes_what_the_gguf_package_counts(model: str) -> None:
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for path in shards_of(model):
        for tensor in gguf.GGUFReader(path).tensors:
            match = re.match(r"blk\.(\d+)\.", tensor.name)
            kind = experts if "_exps." in tensor.name else dense
            kind[match[1] if match else tensor.name] += int(tensor.n_bytes)
    weights = footprint_of(first_shard(model)).weights
    lengths = {str(one.layer): (one.dense_length, one.expert_length) for one in weights.layers}
    assert lengths == {layer: (dense[layer], experts[layer]) for layer in lengths}
    assert len(lengths) == weights.block_count
    assert weights.length == dense.total() + experts.total()
    assert some(weights.outer).embedding_length == dense["token_embd.weight"]
    assert some(weights.outer).output_length == dense["output.weight"]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_pack_of_a_model_says_what_the_model_says(model: str, packs: dict[str, Path]) -> None:
    packed, plain = footprint_of(packs[model]), footprint_of(first_shard(model))
    assert (packed.is_pack, plain.is_pack) == (True, False)
    assert packed[2:] == plain[2:]


def test_of_a_pack_of_experts_alone_no_more_than_these_is_known(tmp_path: Path) -> None:
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", experts_only=True)
    whole = footprint_of(first_shard("qwen3moe")).weights
    footprint, options = footprint_of(tmp_path / "pack"), ContextOptions(4096)
    weights = footprint.weights
    assert footprint.context(options) is None
    assert footprint.compute_length(options) is None
    assert weights == Weights(
        block_count=None,
        layers=tuple(one._replace(dense_length=None) for one in whole.layers),
        outer=None,
        loaded_mtp_length=None,
        shape=whole.shape._replace(dense_length=None),
        parameters=None,
    )
    assert weights.dense_length is weights.length is weights.read_dense_length is None
    assert weights.expert_length == whole.expert_length
    assert weights.read_expert_length == whole.read_expert_length


def test_a_token_reads_one_row_of_embeddings_and_the_experts_that_it_uses(tmp_path: Path) -> None:
    weights = footprint_of(moe((1, 2), experts=4).write(tmp_path / "m.gguf")).weights
    one_expert = 3 * (32 * 64 // 32 * 34)
    assert [one[:4] for one in weights.layers] == [
        (0, 4 * 64, 0, 0),
        (1, 4 * 64, 4 * one_expert, 2 * one_expert),
        (2, 4 * 64, 4 * one_expert, 2 * one_expert),
    ]
    assert weights.read_expert_length == 4 * one_expert
    # 8 words and no output of its own: the embedding is that, and is read whole besides one row.
    norms = 4 * 4 * 64
    assert weights.dense_length == 8 * 4 * 64 + norms
    assert weights.read_dense_length == 4 * 64 + 8 * 4 * 64 + norms
    assert some(weights.outer).is_tied
    assert some(weights.parameters).embedding == 0


def test_layers_for_prediction_are_in_the_file_and_not_run(tmp_path: Path) -> None:
    builder = moe((0, 1, 2), block_count=3)
    builder.put("qwen3moe.nextn_predict_layers", "u32", 1)
    weights = footprint_of(builder.write(tmp_path / "m.gguf")).weights
    assert weights.block_count == 2
    assert [one.layer for one in weights.layers] == [0, 1]
    assert weights.shape.mtp_layers == (2,)
    assert weights.loaded_mtp_length == 0
