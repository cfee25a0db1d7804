"""Strong digests: a SHA-256 of everything, written on request, and checked if it is there."""

import hashlib
from pathlib import Path

import pytest

import moepack
from tests.support.models import FIXTURES, contents, first_shard

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a small real model with strong digests; read-only."""
    path = tmp_path_factory.mktemp("strong") / "pack"
    moepack.pack_model(first_shard("qwen3moe"), path, hotness=HOTNESS, strong=True)
    return path


def test_they_are_those_of_the_bytes_and_nothing_else_changes(pack: Path, tmp_path: Path) -> None:
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "plain", hotness=HOTNESS)
    plain = contents(tmp_path / "plain")
    ours = contents(pack)
    assert {name for name in plain if plain[name] != ours[name]} == {"index.bin", "manifest.json"}
    with moepack.open(pack) as opened, moepack.open(tmp_path / "plain") as plain_pack:
        index = opened.index
        assert index.families == plain_pack.index.families
        assert opened.manifest.index_entry.sha256 == hashlib.sha256(ours["index.bin"]).hexdigest()
        numbers = iter(range(index.part_count + index.tensor_count + index.shard_range_count))
        extents = [
            (file, offset, length)
            for family in index.families
            for expert in range(family.expert_count)
            for offset, length, _, file, _ in index.parts(
                family.first_part + expert * len(family.part_kinds), family.part_kinds
            )
        ]
        extents += [(tensor.file, tensor.offset, tensor.length) for tensor in index.tensors()]
        extents += [(other.file, other.offset, other.length) for other in index.shard_bytes()]
        for file, offset, length in extents:
            data = ours[index.files[file].name][offset : offset + length]
            assert index.strong_digest(next(numbers)) == hashlib.sha256(data).digest()
        assert next(numbers, None) is None
    assert moepack.verify(pack, first_shard("qwen3moe")).passed
