"""Strong digests: a SHA-256 of everything, written on request, and checked where it is."""

import hashlib
from pathlib import Path

import pytest

import moepack
from moepack.errors import RequestError
from moepack.format.index import Index
from tests.support.models import FIXTURES, contents, first_shard
from tests.support.pack_draft import Draft

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
    with moepack.open(pack) as opened, moepack.open(tmp_path / "plain") as other:
        index = opened.index
        assert index.families == other.index.families
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
        extents += [(held.file, held.offset, held.length) for held in index.tensors()]
        extents += [(held.file, held.offset, held.length) for held in index.shard_bytes()]
        for file, offset, length in extents:
            data = ours[index.files[file].name][offset : offset + length]
            assert index.strong_digest(next(numbers)) == hashlib.sha256(data).digest()
        assert next(numbers, None) is None
    assert moepack.verify(pack, first_shard("qwen3moe")).passed


def test_ranking_keeps_them(tmp_path: Path) -> None:
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "pack", strong=True)
    moepack.rank_pack(tmp_path / "pack", HOTNESS)
    report = moepack.verify(tmp_path / "pack")
    assert report.passed
    with moepack.open(tmp_path / "pack") as opened:
        assert opened.manifest.index_entry.sha256 is not None
        assert opened.index.strong_digest(0) is not None


def test_each_one_that_is_wrong_is_found(pack: Path, tmp_path: Path) -> None:
    """Of a part, a tensor and a header."""
    data = (pack / "index.bin").read_bytes()
    index = Index(data, "index.bin")
    section = index.directory["strong_digests"]
    for number in (0, index.part_count, index.part_count + index.tensor_count):
        path = tmp_path / str(number)
        path.mkdir()
        for name, held in contents(pack).items():
            (path / name).write_bytes(held)
        draft = Draft(path)
        draft.index[section.at(number)] ^= 1
        del draft.body["index"]["sha256"]
        draft.save()
        (finding,) = moepack.verify(path).findings
        assert (finding.kind, finding.message.startswith("its SHA-256 is")) == ("digest", True)


def test_they_are_not_written_in_place(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not written in place"):
        moepack.pack_model(first_shard("qwen3moe"), tmp_path / "x", in_place=True, strong=True)
