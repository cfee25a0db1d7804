"""Indexes over shards, and where slices lay in them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import moepack
from moepack.packing.shard_index import index_model
from tests.support.c_readers import c_says, python_says
from tests.support.models import flip


def test_what_has_no_digest_is_not_checked(apart: Path, tmp_path: Path, program: Path) -> None:
    shard = tmp_path / "m.gguf"
    shutil.copy(apart / "shard-00001-of-00001.gguf", shard)
    index_model(shard, tmp_path / "with", digests=True)
    index_model(shard, tmp_path / "without")
    with moepack.open(tmp_path / "with") as pack:
        flip(shard, pack.locate(1, 1, "down").offset)
    checked, unknown = c_says(program, "list", [tmp_path / "with", tmp_path / "without"])
    assert checked.refusal.startswith("DIGEST shard-00001-of-00001.gguf: ffn_down_exps.weight at ")
    assert unknown.refusal == ""
    assert unknown == python_says(tmp_path / "without", reads=True)


def test_shards_that_are_not_what_was_indexed_are_refused(
    apart: Path, tmp_path: Path, program: Path
) -> None:
    name = "shard-00001-of-00001.gguf"
    damages: dict[str, Callable[[Path], object]] = {
        f"DIGEST {name}: the shard's header is not what was indexed": lambda path: flip(path, 40),
        f"DAMAGED {name}: not the shard that was indexed": lambda path: os.truncate(path, 1503),
        f"DAMAGED {name}: the file is missing": Path.unlink,
    }
    paths = []
    for number, damage in enumerate(damages.values()):
        paths.append(Path(shutil.copytree(apart, tmp_path / str(number))))  # follows the link
        damage(paths[-1] / name)
    for words, path, verdict in zip(damages, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal.startswith(words)
        assert python_says(path).refusal
