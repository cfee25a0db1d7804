"""Indexes over shards, and where slices lay in them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moepack
from moepack.packing.shard_index import index_model
from tests.support.c_readers import Case, c_says, drafts, python_says
from tests.support.gguf_builder import F32, moe
from tests.support.grown_packs import grow
from tests.support.models import first_shard, flip, pack_model
from tests.support.pack_draft import Draft, record


def test_an_index_over_the_shards_of_a_real_model_is_read(tmp_path: Path, program: Path) -> None:
    for number, model in enumerate(("qwen3moe", "gpt-oss")):
        path = tmp_path / model
        index_model(first_shard(model), path, digests=bool(number))
        (found,) = c_says(program, "list", [path])
        assert found == python_says(path, reads=True)
        assert found.refusal == ""
        unchecked = [line for line in found.found if line.startswith("part")]
        assert unchecked
        assert all((line.split()[-3] == "None") != bool(number) for line in unchecked)


def test_what_has_no_digest_is_not_checked(apart: Path, tmp_path: Path, program: Path) -> None:
    shard = tmp_path / "m.gguf"
    shutil.copy(apart / "shard-00001-of-00001.gguf", shard)
    index_model(shard, tmp_path / "with", digests=True)
    index_model(shard, tmp_path / "without")
    with moepack.open(tmp_path / "with") as pack:
        flip(shard, pack.locate(1, 1, "down").offset)
    known, unknown = c_says(program, "list", [tmp_path / "with", tmp_path / "without"])
    assert known.refusal.startswith("DIGEST shard-00001-of-00001.gguf: ffn_down_exps.weight at ")
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


def shard_bytes(**fields: Any) -> Callable[[Draft], None]:
    return record("shard_bytes", 0, **fields)


SHARD_RULES = [
    Case("a header in no file", shard_bytes(file=1), "shard_bytes 0: file"),
    Case("one of no bytes", shard_bytes(length=0), "shard_bytes 0: length"),
    Case("one past its file", shard_bytes(offset=1504), "shard_bytes 0: 896 bytes at 1504"),
    Case("one of 2^64 bytes", shard_bytes(length=(1 << 64) - 1), "shard_bytes 0: 1844674407370955"),
    Case("one of shard 2^16", shard_bytes(shard=1 << 16), "shard_bytes 0: shard"),
    Case("one from 2^63", shard_bytes(shard_offset=(1 << 63) - 895), "shard_bytes 0: shard_offset"),
]


def test_each_rule_of_shard_bytes_is_kept_where_shards_are_checked(
    apart: Path, tmp_path: Path, program: Path
) -> None:
    paths = drafts(apart, tmp_path, SHARD_RULES)
    for rule, path, verdict in zip(
        SHARD_RULES, paths, c_says(program, "check", paths), strict=True
    ):
        assert verdict.refusal.startswith(f"DAMAGED index.bin: {rule.words}"), rule.name
        assert python_says(path).place == "shard_bytes 0", rule.name


def own_tensors(folder: Path) -> Path:
    """Write a model in which each expert has tensors of its own, some of them out of order."""
    builder = moe((), 4, architecture="llama", block_count=1)
    for name in ("down", "gate", "up"):
        for expert in (2, 0, 1, 3):
            builder.tensor(f"blk.0.ffn_{name}.{expert}.weight", (32, 4), F32, 128)
    return builder.write(folder / "own.gguf")


def test_slices_of_tensors_of_their_own_are_found(tmp_path: Path, program: Path) -> None:
    model = own_tensors(tmp_path)
    pack_model([model], tmp_path / "pack")
    index_model(model, tmp_path / "index")
    shutil.copytree(tmp_path / "pack", tmp_path / "later")
    grow(tmp_path / "later", longer={"slices": 8})
    paths = [tmp_path / "pack", tmp_path / "later", tmp_path / "index"]
    for path, found in zip(paths, c_says(program, "list", paths), strict=True):
        assert found == python_says(path, reads=True)
        assert found.refusal == ""
        assert (
            len({tuple(line.split()[-2:]) for line in found.found if line.startswith("part")}) == 12
        )
