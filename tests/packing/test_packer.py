"""A pack of a real model: every byte the oracle's, every promise of the format kept on disk."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.errors import PackError, RequestError
from tests.support.gguf_builder import F32, Q8_0, moe, split, write_shards
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, flip, oracle, pack_model


@pytest.mark.parametrize("layout_name", ["layers", "hot-first"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_expert_that_is_read_back_is_the_oracles(
    model: str, layout_name: str, tmp_path: Path
) -> None:
    pack_model([first_shard(model)], tmp_path / "pack", layout_name)
    expected = oracle()[model]
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        held = {f"blk.{layer}.{kind.name}" for layer in pack.layers for kind in pack.parts(layer)}
        assert held == set(expected)
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


@pytest.mark.parametrize("model", REAL_MODELS)
def test_blobs_and_weights_are_aligned_on_disk(model: str, packs: dict[str, Path]) -> None:
    with moepack.open(packs[model]) as pack:
        for file in pack.index.files:
            assert (packs[model] / file.name).stat().st_size == file.length
            assert file.length % 4096 == 0
        for layer in pack.layers:
            for expert in range(pack.expert_count(layer)):
                blob = pack.locate(layer, expert)
                assert blob.offset % 4096 == 0 == blob.length % 4096
                for kind in pack.parts(layer):
                    where = pack.locate(layer, expert, kind.name)
                    assert where.offset % (4096 if kind.name.endswith("weight") else 64) == 0
                    assert blob.offset <= where.offset
                    assert where.offset + where.length <= blob.offset + blob.length


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


def test_hot_first_makes_the_hottest_bytes_one_sequential_read(tmp_path: Path) -> None:
    counts = {(layer, expert): 100 * expert + layer for layer in (0, 1) for expert in range(16)}
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", "hot-first", counts=counts)
    with moepack.open(tmp_path / "pack") as pack:
        hottest = pack.hottest(1 << 40)
        assert hottest == sorted(counts, key=lambda key: -counts[key])
        offsets = [pack.locate(*key) for key in hottest]
        assert [where.rank for where in offsets] == list(range(32))
        assert [where.hotness for where in offsets] == sorted(counts.values(), reverse=True)
        position = 0
        for where in offsets:
            assert where.offset == position
            position += where.length
        budget = offsets[0].length + offsets[1].length
        assert pack.hottest(budget) == hottest[:2]
        assert pack.hottest(budget - 1) == hottest[:1]


def test_hotness_is_none_where_it_was_not_measured(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        assert pack.locate(0, 3).hotness is None
        assert pack.hottest(1 << 40)[:3] == [(0, 0), (0, 1), (0, 2)]


def test_short_names_mean_the_main_familys_parts(packs: dict[str, Path]) -> None:
    with moepack.open(packs["gpt-oss"]) as pack:
        assert pack.locate(0, 1, "up") == pack.locate(0, 1, "ffn_up_exps.weight")
        assert pack.locate(0, 1, "down.bias") == pack.locate(0, 1, "ffn_down_exps.bias")


def test_families_of_one_layer_stand_side_by_side(tmp_path: Path) -> None:
    builder = moe((0,), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    tensors = {spec.name: spec.data for spec in builder.tensors}
    pack_model([builder.write(tmp_path / "m.gguf")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        assert pack.families(0) == ("ffn_exps", "ffn_chexps", "attn_v_exps")
        assert pack.expert_count(0) == 8
        assert pack.expert_count(0, family="ffn_chexps") == 2
        assert len(reader.read(0, 1, family="attn_v_exps")) == 4096
        assert (
            reader.read(0, 2, "attn_v_exps.weight") == tensors["blk.0.attn_v_exps.weight"][-1088:]
        )
        chunk = tensors["blk.0.ffn_up_chexps.weight"]
        assert reader.read(0, 1, "ffn_up_chexps.weight") == chunk[len(chunk) // 2 :]
        assert pack.hottest(1 << 40, family="ffn_chexps") == [(0, 0), (0, 1)]


def test_parts_of_four_bytes_and_of_unknown_type_come_back(tmp_path: Path) -> None:
    builder = moe((1,), type_id=777, block=(64, 37), ne=(64, 64), block_count=2)
    builder.tensor("blk.1.ffn_up_exps.scale", (4,), F32, 16)
    tensors = {spec.name: spec.data for spec in builder.tensors}
    pack_model([builder.write(tmp_path / "m.gguf")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        kind = next(kind for kind in pack.parts(1) if kind.name == "ffn_up_exps.weight")
        assert kind.inferred
        assert kind.type_id == 777
        assert reader.read(1, 2, "up.scale") == tensors["blk.1.ffn_up_exps.scale"][8:12]
        whole = tensors["blk.1.ffn_up_exps.weight"]
        assert reader.read(1, 3, "up") == whole[3 * 64 * 37 :]


def test_a_layer_spread_over_shards_is_packed_whole(tmp_path: Path) -> None:
    builder = moe((0, 1))
    paths = write_shards(split(builder, 1), tmp_path)
    pack_model(paths, tmp_path / "pack")
    tensors = {spec.name: spec.data for spec in builder.tensors}
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        for name in ("gate", "up", "down"):
            whole = tensors[f"blk.1.ffn_{name}_exps.weight"]
            assert b"".join(reader.read(1, expert, name) for expert in range(4)) == whole


def test_views_are_writable_page_aligned_and_the_callers_own(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        with pack.reader() as reader:
            first, second = reader.read(0, 0), reader.read(0, 0)
        assert np.frombuffer(first, np.uint8).ctypes.data % 4096 == 0
        first[0] ^= 0xFF
        assert first != second


def test_read_into_fills_the_callers_buffer_and_nothing_behind_it(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader() as reader:
        expected = reader.read(0, 5, "up")
        buffer = np.full(len(expected) + 8, 0xAA, np.uint8)
        assert reader.read_into(buffer, 0, 5, "up") == len(expected)
        assert buffer[: len(expected)].tobytes() == expected
        assert set(buffer[len(expected) :].tolist()) == {0xAA}
        for bad in (bytearray(len(expected) - 1), bytes(len(expected))):
            with pytest.raises(RequestError, match="the buffer does not fit"):
                reader.read_into(bad, 0, 5, "up")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 0), "no experts in layer 7"),
        ((0, 16), "no expert 16"),
        ((0, -1), "no expert -1"),
        ((0, 0, "sideways"), "no part sideways"),
        ((0, 16, "up"), "no expert 16"),
        ((7, 0, "up"), "no experts in layer 7"),
    ],
)
def test_asking_for_what_is_not_there_is_the_callers_fault(
    packs: dict[str, Path], arguments: tuple[int, int], message: str
) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pytest.raises(RequestError, match=message):
        pack.locate(*arguments)


def test_a_flipped_bit_is_never_returned_as_data(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack, pack.reader() as reader:
        where = pack.locate(1, 4, "down")
        flip(where.path, where.offset + 99)
        with pytest.raises(PackError, match=r"layer 1 expert 4 ffn_down_exps\.weight at byte"):
            reader.read(1, 4, "down")
        with pytest.raises(PackError, match="digest"):
            reader.read(1, 4)
        assert reader.read(1, 5)


def test_a_file_cut_short_or_missing_is_an_error_that_names_the_place(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack, pack.reader() as reader:
        where = pack.locate(1, 15, "down")
        assert reader.read(1, 0)
        with open(where.path, "r+b") as file:
            file.truncate(where.offset + 10)
        with pytest.raises(PackError, match=r"layer 1 expert 15.*expected [\d,]+ bytes, found 10"):
            reader.read(1, 15, "down")
        assert reader.read(1, 0)
    where.path.unlink()
    with moepack.open(pack_copy) as pack, pack.reader() as reader:
        with pytest.raises(PackError, match="layer 1 expert 15 ffn_down_exps.weight.*missing"):
            reader.read(1, 15, "down")
        assert reader.read(0, 0)


def test_a_closed_reader_says_so_and_its_views_live_on(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        reader = pack.reader()
        view = reader.read(0, 0)
        reader.close()
        reader.close()
        with pytest.raises(RequestError, match="closed"):
            reader.read(0, 0)
        assert len(view) == pack.locate(0, 0).length


def test_a_closed_pack_says_so(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        pass
    for arguments in ((0, 0), (0, 0, "up")):
        with pytest.raises(RequestError, match="the pack is closed"):
            pack.locate(*arguments)


def test_the_manifest_holds_no_path_and_no_time(packs: dict[str, Path]) -> None:
    body = json.loads((packs["gpt-oss"] / "manifest.json").read_text())
    assert body["source"]["architecture"] == "gpt-oss"
    assert body["source"]["shards"][0]["name"] == first_shard("gpt-oss").name
    assert "/" not in json.dumps(body)


def test_a_directory_that_is_no_pack_is_described(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "no manifest"), (tmp_path / "none", "no such pack")):
        with pytest.raises(PackError, match=message):
            moepack.open(path)
