"""A pack of a real model: every byte the oracle's, every promise of the format kept on disk."""

import hashlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

import moepack
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, oracle, pack_model


@pytest.mark.parametrize(
    ("model", "layout_name"),
    zip(REAL_MODELS, itertools.cycle(("layers", "hot-first")), strict=False),
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
