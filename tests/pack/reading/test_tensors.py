"""Weights as numpy arrays: those that gguf-py reads in the source, without a copy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

import moepack
from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack
from tests.support.gguf_builder import TensorSpec, moe, split, write_shards
from tests.support.models import REAL_MODELS, first_shard, shards_of

BF16 = 30


def tensors_of(paths: list[str]) -> dict[str, Any]:
    """Read the tensors of shards with gguf-py."""
    return {tensor.name: tensor for path in paths for tensor in GGUFReader(path).tensors}


def check(array: Any, expected: Any) -> None:
    """Compare type, shape and bytes: among random ones are floats that are no numbers.

    Of BF16 gguf-py gives bytes.
    """
    if array.dtype == np.uint16:
        expected = expected.view("<u2")
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


def check_tensors(pack: Pack, expected: dict[str, Any]) -> int:
    """Compare all parts and dense tensors of a pack with what gguf-py reads; count values."""
    value_count = 0
    for layer in pack.layers:
        for family in pack.families(layer):
            for kind in pack.parts(layer, family=family):
                tensor = expected.pop(f"blk.{layer}.{kind.name}")
                for expert in range(pack.expert_count(layer, family=family)):
                    array = pack.tensor(layer, expert, kind.name, family=family)
                    check(array, tensor.data[expert])
                    assert not array.flags.writeable
                values = pack.tensor(layer, 1, kind.name, family=family, dequantize=True)
                check(values, dequantize(tensor.data[1], tensor.tensor_type))
                value_count += values.size
    for name, tensor in expected.items():
        check(pack.dense_tensor(name), tensor.data)
        values = pack.dense_tensor(name, dequantize=True)
        check(values, dequantize(tensor.data, tensor.tensor_type))
        value_count += values.size
    return value_count


@pytest.mark.parametrize("model", REAL_MODELS)
def test_arrays_are_those_of_gguf_py(model: str, packs: dict[str, Path]) -> None:
    for path in (packs[model], first_shard(model)):
        with moepack.open(path) as pack:
            assert check_tensors(pack, tensors_of(shards_of(model))) > 10_000


def test_types_that_numpy_has_keep_their_type(tmp_path: Path) -> None:
    builder = moe((0,), 2, ne=(8, 4), type_id=BF16, block=(1, 2))
    values = np.arange(12, dtype="<f8")
    builder.tensors.append(TensorSpec("doubles", (4, 3), 28, values.tobytes()))
    builder.tensors.append(TensorSpec("halves", (12,), 1, values.astype("<f2").tobytes()))
    builder.tensors.append(TensorSpec("integers", (3, 2, 2), 26, values.astype("<i4").tobytes()))
    with moepack.open(write_shards(split(builder, 2), tmp_path)[0]) as pack:
        up = pack.tensor(0, 1, "up")
        assert (up.dtype.str, up.shape) == ("<u2", (4, 8))
        floats = pack.tensor(0, 1, "up", dequantize=True)
        assert np.array_equal(floats.view("<u4") >> 16, up)
        assert np.array_equal(pack.dense_tensor("doubles"), values.reshape(3, 4))
        assert pack.dense_tensor("halves").dtype == np.float16
        assert pack.dense_tensor("halves", dequantize=True).dtype == np.float32
        assert pack.dense_tensor("integers").shape == (2, 2, 3)
        with pytest.raises(RequestError, match="integers: gguf-py has no values of type I32"):
            pack.dense_tensor("integers", dequantize=True)


def test_an_array_outlives_its_pack_and_is_no_copy(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        first, again = pack.tensor(0, 1, "up"), pack.tensor(0, 1, "up")
        assert np.shares_memory(first, again)
        kept = first.copy()
    assert np.array_equal(first, kept)
    with pytest.raises(RequestError, match="the pack is closed"):
        pack.tensor(0, 1, "up")
    with pytest.raises(RequestError, match="the pack is closed"):
        pack.dense_tensor("output.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_mapping_ends_with_the_pack_and_its_last_array(packs: dict[str, Path]) -> None:
    maps = Path("/proc/self/maps")
    name = "mixtral/experts-"
    with moepack.open(packs["mixtral"]) as pack:
        array = pack.tensor(0, 1, "up")
        assert name in maps.read_text()
    assert name in maps.read_text()
    del array
    assert name not in maps.read_text()
