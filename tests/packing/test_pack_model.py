"""One call packs a model: its arguments, its summary, and the same from the command."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError, TraceError
from moepack.pack.format import records
from moepack.pack.verifying.verifier import verify
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.plan import layout
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.shard_index import index_model
from moepack.report.facts import to_json
from moepack.traces.hotness.measure import load
from moepack.traces.model import Origin
from tests.support.gguf_builder import moe
from tests.support.models import FIXTURES, contents, first_shard, hotness_of, shards_of
from tests.support.warm_command import Run

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"


def test_the_summary_is_what_the_command_prints(tmp_path: Path, cli: Run) -> None:
    shard, target = first_shard("qwen3moe"), tmp_path / "theirs"
    summary = pack_model(shard, tmp_path / "ours", hotness=HOTNESS)
    run = cli("pack", shard, "-o", target, "--hotness", HOTNESS, "--json")
    printed = json.loads(run.stdout)
    machine = {key: printed[key] for key in ("path", "free_space", "seconds")}
    assert to_json(replace(summary, **machine)) == printed
    assert contents(tmp_path / "ours") == contents(target)


def test_the_summary_is_that_of_what_lies_on_disk(tmp_path: Path) -> None:
    summary = pack_model(first_shard("qwen3moe"), tmp_path / "pack", layout="hot-first")
    files = contents(tmp_path / "pack")
    assert {file.name: file.length for file in summary.files} == {
        name: len(data)
        for name, data in files.items()
        if name not in ("index.bin", "manifest.json")
    }
    assert [file.name for file in summary.files] == ["experts-00000.bin", "dense.bin"]
    assert summary.data_length == summary.written_length == sum(f.length for f in summary.files)
    assert summary.index_length == len(files["index.bin"])
    assert (summary.order, summary.resumed_file_count) == ("source", 0)


@pytest.mark.parametrize(
    ("layout_name", "hotness", "order"),
    [
        ("hot-first", HOTNESS, "hotness"),
        ("hot-first", None, "source"),
        ("natural", HOTNESS, "source"),
    ],
)
def test_a_pack_that_is_there_has_the_order_in_which_it_was_made(
    layout_name: str, hotness: Path | None, order: str, tmp_path: Path
) -> None:
    for _ in range(2):
        shard = first_shard("qwen3moe")
        done = pack_model(shard, tmp_path / "pack", layout=layout_name, hotness=hotness)
        assert done.order == order
    assert done.is_finished


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    dry = pack_model(first_shard("qwen3moe"), tmp_path / "pack", dry_run=True)
    assert not (tmp_path / "pack").exists()
    assert (dry.written_length, dry.resumed_file_count) == (None, None)
    done = pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    assert done.seconds
    same = replace(done, written_length=None, resumed_file_count=None, seconds=None, dry_run=True)
    assert replace(same, free_space=dry.free_space) == dry


@pytest.mark.parametrize("there", ["pack", "file", "other", "no/folder"])
def test_a_dry_run_is_refused_where_the_run_would_be(there: str, tmp_path: Path) -> None:
    target = tmp_path / there
    if there == "pack":
        pack_model(first_shard("qwen3moe"), target)
    elif there == "file":
        target.touch()
    elif there == "other":
        target.mkdir()
        (target / "diary.txt").touch()
    messages = []
    for dry_run in (True, False):
        with pytest.raises(RequestError) as caught:
            pack_model(first_shard("qwen3moe"), target, dry_run=dry_run, layers="0")
        messages.append((str(caught.value), caught.value.hint))
    assert messages[0] == messages[1]


def test_sources_layouts_hotness_and_layers_may_be_named_or_given(tmp_path: Path) -> None:
    named = tmp_path / "named"
    pack_model(str(first_shard("qwen3moe")), str(named), hotness=HOTNESS, layers="1")
    loaded = tmp_path / "loaded"
    pack_model(
        shards_of("qwen3moe"),
        loaded,
        layout=layout.load(layout.DEFAULT),
        hotness=load(str(HOTNESS)),
        layers=iter([1]),
    )
    assert contents(named) == contents(loaded)
    with moepack.open(loaded) as pack:
        assert pack.manifest.layers == [1]
        assert pack.manifest.hotness is not None
        assert pack.manifest.hotness["measured_blob_count"] == 16
    for number, layers in enumerate((None, "0-1", [1, 0])):
        pack_model(first_shard("qwen3moe"), tmp_path / str(number), layers=layers)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "0")


@pytest.mark.parametrize("name", ["qwen3moe-trace.csv", "a recording"])
def test_nothing_in_a_pack_says_which_files_its_hotness_came_from(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "home of Erika"
    folder.mkdir()
    secret = folder / "letters-to-my-doctor"
    if name == "a recording":
        trace = os.fspath(shutil.copy(FIXTURES / "qwen3moe-trace.csv", secret))
        secret = folder / "letters-to-my-doctor.moetrace"
        moepack.import_trace([trace], secret)
    else:
        secret = Path(shutil.copy(FIXTURES / name, secret.with_suffix(".csv")))
    source = Path(shutil.copytree(first_shard("qwen3moe").parent, folder / "models"))
    shard = source / first_shard("qwen3moe").name
    pack_model(shard, folder / "pack", hotness=secret)
    index_model(shard, folder / "index", hotness=secret)
    pack_model(shard, folder / "ranked")
    moepack.rank_pack(folder / "ranked", secret)
    for pack in ("pack", "index", "ranked"):
        assert json.loads((folder / pack / "manifest.json").read_text())["hotness"]
        for file in (folder / pack).iterdir():
            data = file.read_bytes() if not file.is_symlink() else b""
            for words in (b"Erika", b"letters", b"doctor", os.fsencode(tmp_path.name)):
                assert words not in data, (pack, file.name)


@pytest.mark.parametrize("layers", ["", "1-", "3-1", "x", "0-99999", []])
def test_what_is_no_list_of_layers_is_refused(layers: str | list[int], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="layers"):
        pack_model(first_shard("qwen3moe"), tmp_path / "pack", layers=layers)
    assert not (tmp_path / "pack").exists()


def test_hotness_of_another_model_is_refused(tmp_path: Path) -> None:
    """A model with fewer experts names none that a larger one has not."""
    small = moe((0, 1), 2).write(tmp_path / "small.gguf")
    origin = Origin("recorded", "small.gguf", expert_counts=moepack.shape_of(small).expert_counts)
    hotness = hotness_of({(0, 1): 1})._replace(origins=(origin.to_json(),))
    pack_model(small, tmp_path / "pack", hotness=hotness)
    with pytest.raises(TraceError, match="counted on another model"):
        pack_model(first_shard("qwen3moe"), tmp_path / "other", hotness=hotness)
    with pytest.raises(TraceError, match="no such expert"):
        pack_model(first_shard("qwen3moe"), tmp_path / "other", hotness=hotness_of({(0, 16): 1}))
    assert not (tmp_path / "other").exists()


def test_prediction_layers_are_not_all_that_is_left_out(tmp_path: Path) -> None:
    builder = moe((0, 1, 2)).put("qwen3moe.nextn_predict_layers", "u32", 1)
    path = builder.write(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="no layers are left"):
        pack_model(path, tmp_path / "none", mtp=False, layers=[2])


@pytest.mark.parametrize(("sha256", "strong"), [(False, False), (True, False), (True, True)])
def test_progress_ends_at_its_total_in_one_phase_or_several(
    sha256: bool, strong: bool, tmp_path: Path
) -> None:
    """The source is read for its SHA-256 first, and a pack that knows them is read twice."""
    steps: list[tuple[int, int]] = []

    def note(count: int, total: int) -> None:
        steps.append((count, total))
        assert sum(done for done, _ in steps) <= total

    path = tmp_path / "pack"
    shard = first_shard("qwen3moe")
    summary = pack_model(shard, path, sha256=sha256, strong=strong, progress=note)
    assert sum(done for done, _ in steps) == steps[-1][1]
    assert sha256 or steps[-1][1] == summary.data_length
    assert len({total for _, total in steps}) == 1, "all of it is known from the beginning"
    steps.clear()
    report = verify(path, progress=note)
    assert sum(done for done, _ in steps) == steps[-1][1]
    assert sha256 or report.read_length == steps[-1][1]


def test_what_no_index_holds_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = moe((0, 1), 2).write(tmp_path / "m.gguf")
    monkeypatch.setattr(records, "MAX_LAYERS", 2)
    monkeypatch.setitem(records.COUNTS, "blobs", (1, 4))
    pack_model(path, tmp_path / "pack", dry_run=True)
    monkeypatch.setitem(records.COUNTS, "blobs", (1, 3))
    with pytest.raises(RequestError, match="too many blobs"):
        pack_model(path, tmp_path / "pack")
    monkeypatch.setattr(records, "MAX_LAYERS", 1)
    with pytest.raises(RequestError, match="too many layers"):
        pack_model(path, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_what_appears_while_the_source_is_read_stays(tmp_path: Path) -> None:
    def progress(_count: int, _total: int) -> None:
        (tmp_path / "pack").mkdir(exist_ok=True)
        (tmp_path / "pack" / "mine").write_bytes(b"mine")

    with pytest.raises(RequestError, match="not empty"):
        pack_model(first_shard("qwen3moe"), tmp_path / "pack", sha256=True, progress=progress)
    assert contents(tmp_path / "pack") == {"mine": b"mine"}


@pytest.mark.parametrize("packing", [pack_model, pack_in_place])
def test_what_is_refused_is_refused_before_there_is_a_plan(
    packing: Callable[..., PackSummary], tmp_path: Path
) -> None:
    """And before the source is read for its SHA-256."""
    for shard in shards_of("qwen3moe"):
        shutil.copy(shard, tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine").touch()
    plans: list[object] = []
    source = next(tmp_path.glob("*-00001-of-*.gguf"))
    with pytest.raises(RequestError, match="not empty"):
        packing(
            source,
            tmp_path / "pack",
            sha256=packing is pack_model,
            planned=plans.append,
            progress=lambda *step: plans.append(step),
        )
    assert plans == []
