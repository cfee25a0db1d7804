"""The dense part of a source: with the experts it is every byte that is not zero."""

from pathlib import Path

import pytest

from moepack.common.errors import MachineError, SourceError
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts
from moepack.source.shards import open_source
from tests.support.gguf_builder import moe


def test_padding_is_read_where_a_single_bit_of_it_is_set(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("odd.weight", (3,), 0, 12).tensor("more.weight", (8,), 0, 32)
    path = builder.write(tmp_path / "m.gguf")
    source = open_source(path)
    odd = next(t for _, t in source.tensors() if t.name == "odd.weight")
    assert len(find_dense(source, find_experts(source)).other_ranges) == 1
    data = bytearray(path.read_bytes())
    data[odd.offset + 31] = 0x80
    path.write_bytes(data)
    source = open_source(path)
    (_, padding) = find_dense(source, find_experts(source)).other_ranges
    assert padding == (0, odd.offset + 12, 20)


@pytest.mark.parametrize(("type_id", "axes"), [(36, (4, 0)), (144, (0, 3)), (0, (0,))])
def test_a_tensor_without_elements_takes_no_bytes(
    type_id: int, axes: tuple[int, ...], tmp_path: Path
) -> None:
    """Also of a type whose tensors have a tail, or whose rows have bytes of their own."""
    builder = moe((0,)).tensor("empty.weight", axes, type_id, 0).tensor("more.weight", (8,), 0, 32)
    source = open_source(builder.write(tmp_path / "m.gguf"))
    dense = find_dense(source, find_experts(source)).tensors
    assert [tensor.tensor.length for tensor in dense if tensor.tensor.name == "empty.weight"] == [0]


def test_a_shard_that_is_gone_is_said(tmp_path: Path) -> None:
    path = moe((0,)).write(tmp_path / "m.gguf")
    source = open_source(path)
    experts = find_experts(source)
    path.unlink()
    with pytest.raises((SourceError, MachineError), match="No such file") as raised:
        find_dense(source, experts)
    assert raised.value.path == str(path)
