"""The rows of a pack: all of them, the hottest, and their formats."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.common.sizes import size_text
from moepack.inspection.listing import BlobRow, TensorRow, list_pack
from moepack.report import model_text
from tests.support.models import REAL_MODELS, first_shard, pack_model
from tests.support.warm_command import Run

CONFORMANCE = Path(__file__).parents[2] / "conformance" / "packs"
COUNTS = {(layer, expert): (expert * 5) % 7 for layer in (2, 3) for expert in range(16)}


@pytest.fixture
def hot_pack(tmp_path: Path) -> Path:
    """Pack deepseek2 by counts; its layers 0 and 1 have no experts."""
    pack_model([first_shard("deepseek2")], tmp_path / "pack", "hot-first", counts=COUNTS)
    return tmp_path / "pack"


def blobs(path: Path, **options: Any) -> list[BlobRow]:
    return [row for row in list_pack(path, **options) if isinstance(row, BlobRow)]


def table(rows: list[BlobRow]) -> list[str]:
    return str(model_text.listing({"blobs": rows, "tensors": []})).splitlines()


def tensors(path: Path, **options: Any) -> list[TensorRow]:
    return [row for row in list_pack(path, **options) if isinstance(row, TensorRow)]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_blob_and_tensor_is_where_it_is_located(model: str, packs: dict[str, Path]) -> None:
    rows = list(list_pack(packs[model]))
    with moepack.open(packs[model]) as pack:
        assert sum(row.kind == "blob" for row in rows) == pack.index.blob_count
        for row in rows:
            if isinstance(row, BlobRow):
                location = pack.locate(row.layer, row.expert, family=row.family)
                assert tuple(row) == tuple(location)
            else:
                tensor = pack.locate_dense(row.name)
                assert row[1:] == (tensor.name, tensor.type_name, tensor.shape, *tensor[4:7])
        names = [row.name for row in rows if isinstance(row, TensorRow)]
        assert names == [tensor.name for tensor in pack.dense()]
    assert len(set(rows)) == len(rows)


def test_the_hottest_are_listed_in_the_order_of_their_ranks_up_to_a_length(hot_pack: Path) -> None:
    everything = sorted(blobs(hot_pack), key=lambda row: row.rank)
    length = everything[0].length
    assert list(list_pack(hot_pack, hottest=3 * length)) == everything[:3]
    assert list(list_pack(hot_pack, hottest=4 * length - 1)) == everything[:3]
    assert list(list_pack(hot_pack, hottest=1 << 60)) == everything
    of_layer = [row for row in everything if row.layer == 3]
    assert list(list_pack(hot_pack, hottest=2 * length, layers=[3])) == of_layer[:2]


def test_layers_leave_out_others_and_tensors_of_none(hot_pack: Path) -> None:
    assert {row.layer for row in list_pack(hot_pack, layers="0,3")} == {0, 3}
    assert {row.layer for row in blobs(hot_pack, layers="0,3")} == {3}
    assert {row.layer for row in tensors(hot_pack)} == {None, 0, 1, 2, 3}
    assert tensors(hot_pack, layers="0")[0].name.startswith("blk.0.")
    with pytest.raises(RequestError, match="no layer 4") as caught:
        list_pack(hot_pack, layers="3-4")
    assert caught.value.hint == "it holds layers 0-3"
    with pytest.raises(RequestError, match="not a list of layers"):
        list_pack(hot_pack, layers="3-")


def test_a_pack_without_hotness_has_no_hottest(packs: dict[str, Path]) -> None:
    assert {row.hotness for row in blobs(packs["granite"])} == {None}
    with pytest.raises(RequestError, match="no hotness was measured"):
        list_pack(packs["granite"], hottest=1 << 30)


def test_an_index_over_shards_has_no_place_for_an_expert(tmp_path: Path) -> None:
    moepack.index_model(first_shard("deepseek2"), tmp_path / "index")
    with moepack.open(tmp_path / "index") as pack:
        for row in blobs(tmp_path / "index"):
            assert (row.path, row.offset) == (None, None)
            assert row.length == pack.hotness(row.layer, row.expert, family=row.family).length
    heading, line = table(blobs(tmp_path / "index")[:1])
    assert heading.split() == ["layer", "expert", "rank", "hotness", "length"]
    assert line.split() == ["2", "0", "0", "–", *size_text(row.length).split()]


def test_experts_with_and_without_blobs_are_in_one_table() -> None:
    heading, *lines = table(blobs(CONFORMANCE / "both-kinds"))
    assert heading.split() == ["layer", "expert", "rank", "hotness", "length", "offset", "file"]
    assert [line.split() for line in lines] == [
        ["0", "0", "2", "5", "96", "B"],
        ["0", "1", "0", "9", "96", "B"],
        ["1", "0", "1", "7", "192", "B", "0", "experts-00001.bin"],
        ["1", "1", "3", "0", "192", "B", "192", "experts-00001.bin"],
    ]


def test_a_model_that_is_not_packed_is_listed_as_an_index_of_it_is(tmp_path: Path) -> None:
    source = first_shard("deepseek2")
    moepack.index_model(source, tmp_path / "index")
    of_index = list(list_pack(tmp_path / "index"))
    rows = list(list_pack(source))
    assert rows[0].layer == 2
    assert len(rows) == len(of_index)
    for row, other in zip(rows, of_index, strict=True):
        if isinstance(row, TensorRow) and isinstance(other, TensorRow):
            assert row.path.parent == Path(source).parent
            assert row == other._replace(path=row.path)
        else:
            assert row == other


def test_csv_and_json_say_the_same(hot_pack: Path, cli: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("list", hot_pack, "--csv").stdout)))
    body = json.loads(cli("list", hot_pack, "--json").stdout)
    assert set(body) == {"blobs", "tensors"}
    assert all(body.values())
    objects = [one | {"kind": kind} for kind in ("blob", "tensor") for one in body[f"{kind}s"]]
    assert len(rows) == len(objects)
    for row, one in zip(rows, objects, strict=True):
        cells = one | ({"shape": "x".join(map(str, one["shape"]))} if "shape" in one else {})
        texts = {name: "" if value is None else str(value) for name, value in cells.items()}
        assert row == dict.fromkeys(model_text.COLUMNS, "") | texts


def test_the_command_prints_a_pinning_list(hot_pack: Path, cli: Run) -> None:
    length = blobs(hot_pack)[0].length
    size = f"{2 * length}"
    body = json.loads(cli("list", hot_pack, "--hottest", size, "--json").stdout)
    assert [blob["rank"] for blob in body["blobs"]] == [0, 1]
    assert body["tensors"] == []
    first = body["blobs"][0]
    lines = cli("list", hot_pack, "--hottest", size, "--csv").stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"blob,{first['layer']},{first['expert']},ffn_exps,{first['path']},")
    text = cli("list", hot_pack).stdout.splitlines()
    assert len(text) == 2 + len(list(list_pack(hot_pack)))
    assert all(len(line) <= 80 for line in text)
    run = cli("list", hot_pack, "--json", "--csv")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--csv and --json at once" in run.stderr
