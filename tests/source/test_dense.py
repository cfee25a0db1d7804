"""The dense part of a source: with the experts it is every byte that is not zero."""

from pathlib import Path

import pytest

from moepack.errors import MachineError, SourceError
from moepack.source.dense import find_dense, header_length
from moepack.source.experts import find_experts
from moepack.source.shards import open_source
from tests.support import odd_models
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, shards_of


@pytest.mark.parametrize("model", [*REAL_MODELS, *odd_models.MODELS])
def test_experts_dense_tensors_and_other_ranges_are_all_but_zeros(
    model: str, tmp_path: Path
) -> None:
    shards = shards_of(model) if model in REAL_MODELS else odd_models.write(model, tmp_path / "s")
    source = open_source(shards[0])
    experts = find_experts(source)
    dense = find_dense(source, experts)
    seen = [bytearray(shard.file_length) for shard in source.shards]
    ranges: list[tuple[int, int, int]] = [*dense.other_ranges]
    ranges += [(held.shard, held.tensor.offset, held.tensor.length) for held in dense.tensors]
    for family in experts.families:
        for part in family.parts:
            for expert in range(family.expert_count):
                ranges.append((*part.slices.at(expert), part.length))
    for shard, offset, length in ranges:
        assert not any(seen[shard][offset : offset + length]), "two of them overlap"
        assert offset + length <= len(seen[shard])
        seen[shard][offset : offset + length] = b"\1" * length
    for header, held in zip(source.shards, seen, strict=True):
        data = Path(header.path).read_bytes()
        assert not any(byte for byte, is_held in zip(data, held, strict=True) if not is_held)
    headers = [found for found in dense.other_ranges if not found.offset]
    assert [found.shard for found in headers] == list(range(len(source.shards)))
    assert [found.length for found in headers] == [header_length(s) for s in source.shards]
    assert bool(len(dense.other_ranges) - len(headers)) is (model == "padded")


def test_names_are_in_the_order_of_the_source(tmp_path: Path) -> None:
    source = open_source(moe((1,)).write(tmp_path / "m.gguf"))
    dense = find_dense(source, find_experts(source))
    names = [held.tensor.name for held in dense.tensors]
    assert names == [
        *("token_embd.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight"),
        "output_norm.weight",
    ]


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
    assert [held.tensor.length for held in dense if held.tensor.name == "empty.weight"] == [0]


def test_a_shard_that_is_gone_is_said(tmp_path: Path) -> None:
    path = moe((0,)).write(tmp_path / "m.gguf")
    source = open_source(path)
    experts = find_experts(source)
    path.unlink()
    with pytest.raises((SourceError, MachineError), match="No such file") as raised:
        find_dense(source, experts)
    assert raised.value.path == str(path)
