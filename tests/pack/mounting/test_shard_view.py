"""The bytes of each shard, read from where they lie in packs of every kind."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import PackError
from moepack.pack.mounting.file_system import ShardView
from moepack.pack.reading.shard_map import map_shards
from moepack.storage.inputs import Inputs
from tests.support.gguf_builder import moe
from tests.support.models import first_shard, flip, pack_model, shards_of


@contextmanager
def views(pack: Path) -> Iterator[list[ShardView]]:
    """Open views of all shards of a pack."""
    with moepack.open(pack) as opened, Inputs(opened.file_paths, PackError) as inputs:
        yield [ShardView(shard, inputs) for shard in map_shards(opened)]


def read(view: ShardView, offset: int, length: int) -> bytes:
    """Read into memory that is not zero, so that zeros have to be written."""
    memory = bytearray(b"\xff" * length)
    return bytes(memory[: view.read_into(memoryview(memory), offset)])


@pytest.mark.parametrize("kind", ["hot-first", "natural", "16 KiB", "index"])
def test_any_range_of_any_kind_of_pack_is_right(kind: str, tmp_path: Path) -> None:
    """Ranges begin and end at, before and behind the borders of all pieces."""
    source = first_shard("deepseek2")
    counts = {(layer, expert): (expert * 5) % 7 for layer in (2, 3) for expert in range(16)}
    if kind == "index":
        moepack.index_model(source, tmp_path / "pack")
    elif kind == "16 KiB":
        pack_model([source], tmp_path / "pack", alignment=16384)
    else:
        pack_model([source], tmp_path / "pack", kind, counts=counts)
    with moepack.open(tmp_path / "pack") as pack:
        maps = map_shards(pack)
    dice = random.Random(kind)
    with views(tmp_path / "pack") as shard_views:
        for view, shard, path in zip(shard_views, maps, shards_of("deepseek2"), strict=True):
            data = Path(path).read_bytes()
            borders = [offset for piece in shard.pieces for offset in (piece.offset, piece.end)]
            for border in borders:
                start = max(0, border - dice.choice((0, 1, 4096)))
                length = dice.choice((1, 2, 4097, 131_072))
                assert read(view, start, length) == data[start : start + length]


def test_what_lies_between_tensors_is_zeros_and_what_is_no_tensors_is_kept(tmp_path: Path) -> None:
    """Tensors of 4 bytes and 28 of padding, the last of which are not zero."""
    source = moe((0, 1), ne=(1, 1), type_id=0, block=(1, 4)).write(tmp_path / "model.gguf")
    flip(source, source.stat().st_size - 3)
    data = source.read_bytes()
    pack_model([source], tmp_path / "pack")
    with views(tmp_path / "pack") as (view,):
        for start in range(len(data) + 2):
            assert read(view, start, 40) == data[start : start + 40]
        assert read(view, 0, len(data) + 9) == data


def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_the_part(
    pack_copy: Path,
) -> None:
    with views(pack_copy) as shard_views:
        os.truncate(pack_copy / "experts-00001.bin", 100)
        message = (
            r"experts-00001.bin: layer 1 expert \d+ ffn_\w+_exps.weight at byte [\d,]+: .*shorter"
        )
        with pytest.raises(PackError, match=message):
            all(read(view, 0, view.length) for view in shard_views)
