"""A pack of a real model: every byte is the oracle's, on request with a SHA-256 of each part."""

import errno
import hashlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError
from moepack.packing.writing import commit
from moepack.storage.atomic import sync_directory
from tests.support.models import FIXTURES, REAL_MODELS, contents, first_shard, oracle, pack_model


@pytest.mark.parametrize(
    ("model", "layout_name"),
    [*zip(REAL_MODELS, itertools.cycle(("layers", "hot-first")), strict=False)],
)
def test_every_expert_that_is_read_back_is_the_oracles(
    model: str, layout_name: str, tmp_path: Path
) -> None:
    pack_model([first_shard(model)], tmp_path / "pack", layout_name)
    expected = oracle()[model]
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        names = {f"blk.{layer}.{kind.name}" for layer in pack.layers for kind in pack.parts(layer)}
        assert names == set(expected)
        for layer in pack.layers:
            for expert in range(pack.expert_count(layer)):
                blob = reader.read(layer, expert)
                for kind in pack.parts(layer):
                    data = reader.read(layer, expert, kind.name)
                    digest = hashlib.sha256(data).hexdigest()[:16]
                    tensor = expected[f"blk.{layer}.{kind.name}"]
                    assert digest == tensor["sha256_16"][expert]
                    assert kind.type_name == tensor["type"]
                    assert list(kind.shape) == tensor["ne"][: len(kind.shape)]
                    start = pack.locate(layer, expert, kind.name).offset_in_blob
                    assert blob[start : start + kind.length] == data


@pytest.mark.parametrize("layout_name", ["layers", "hot-first"])
def test_the_same_input_gives_the_same_bytes_wherever_and_whenever(
    tmp_path: Path, layout_name: str
) -> None:
    elsewhere = tmp_path / "other place"
    elsewhere.mkdir()
    for shard in FIXTURES.glob("gpt-oss-*.gguf"):
        shutil.copyfile(shard, elsewhere / shard.name)
    first = [first_shard("gpt-oss"), elsewhere / first_shard("gpt-oss").name]
    counts = {(layer, expert): (expert * 7) % 5 for layer in (0, 1) for expert in range(8)}
    for number, path in enumerate(first):
        target = tmp_path / f"pack{number}"
        pack_model([path], target, layout_name, counts=counts, threads=1 + 3 * number)
    for file in sorted((tmp_path / "pack0").iterdir()):
        assert file.read_bytes() == (tmp_path / "pack1" / file.name).read_bytes()
        assert os.fsencode(tmp_path) not in file.read_bytes()


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


def test_a_pack_that_may_not_outlive_a_loss_of_power_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_until_the_commit(path: Path) -> None:
        if (tmp_path / "pack" / "manifest.json").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(path)

    monkeypatch.setattr(commit, "sync_directory", sync_until_the_commit)
    with pytest.raises(MachineError, match="the pack is whole, but may not outlive") as caught:
        pack_model([first_shard("qwen3moe")], tmp_path / "pack")
    assert "`moepack verify`" in (caught.value.hint or "")
    assert moepack.verify(tmp_path / "pack").passed


def test_a_folder_that_cannot_be_locked_is_not_packed_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(MachineError, match=os.strerror(errno.ENOLCK)):
        pack_model([first_shard("qwen3moe")], tmp_path / "pack")
    assert set(contents(tmp_path / "pack")) <= {"pack.journal"}
