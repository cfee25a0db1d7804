"""One call packs a model: what it takes, what it says, and that the command says the same."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import moepack
from moepack.errors import MachineError, RequestError, TraceError
from moepack.hotness.file import load
from moepack.packing import layout
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.report.json_text import to_json
from moepack.trace.model import Origin
from moepack.verifying.verifier import verify
from tests.support.gguf_builder import moe
from tests.support.models import FIXTURES, contents, first_shard, hotness_of, shards_of

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"
FIELDS = (
    *("layout", "order", "layers", "selected_layers", "is_whole", "blob_count"),
    *(
        "measured_blob_count",
        "hotness_token_count",
        "file_count",
        "files",
        "index_length",
        "data_length",
    ),
    *("expert_length", "stored_length", "codec", "dense_length"),
    *("payload_length", "padding_length", "padding_share"),
    *("path", "dry_run", "free_space", "written_length", "resumed_file_count", "seconds"),
    "in_place",
)


def test_the_summary_is_what_the_command_prints(
    tmp_path: Path, moepack_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    summary = pack_model(first_shard("qwen3moe"), tmp_path / "ours", hotness=HOTNESS)
    run = moepack_command(
        *(
            "pack",
            first_shard("qwen3moe"),
            "-o",
            tmp_path / "theirs",
            "--hotness",
            HOTNESS,
            "--json",
        )
    )
    printed = json.loads(run.stdout)
    assert sorted(printed) == sorted(FIELDS)
    ours = replace(
        summary,
        path=printed["path"],
        free_space=printed["free_space"],
        seconds=printed["seconds"],
    )
    assert to_json(ours) == printed
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_the_summary_is_that_of_what_lies_on_disk(tmp_path: Path) -> None:
    summary = pack_model(first_shard("qwen3moe"), tmp_path / "pack", layout="hot-first")
    held = contents(tmp_path / "pack")
    assert {file.name: file.length for file in summary.files} == {
        name: len(data) for name, data in held.items() if name not in ("index.bin", "manifest.json")
    }
    assert [file.name for file in summary.files] == ["experts-00000.bin", "dense.bin"]
    assert summary.data_length == summary.written_length == sum(f.length for f in summary.files)
    assert summary.index_length == len(held["index.bin"])
    assert (summary.order, summary.resumed_file_count) == ("source", 0)


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    dry = pack_model(first_shard("qwen3moe"), tmp_path / "pack", dry_run=True)
    assert not (tmp_path / "pack").exists()
    assert (dry.written_length, dry.resumed_file_count) == (None, None)
    done = pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    assert done.seconds
    same = replace(done, written_length=None, resumed_file_count=None, seconds=None, dry_run=True)
    assert replace(same, free_space=dry.free_space) == dry


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB, where this may be done."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"]
    if subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_dry_run_ends_as_the_run_would_where_there_is_no_space(small_disk: Path) -> None:
    target = small_disk / "pack"
    for dry_run in (True, False):
        with pytest.raises(MachineError, match="not enough space.*expected .*found") as caught:
            pack_model(first_shard("qwen3moe"), target, dry_run=dry_run)
        assert caught.value.path == str(target)
    assert not list(small_disk.iterdir())
    assert pack_model(first_shard("qwen3moe"), target, layers="0", dry_run=True).dry_run


def test_a_dry_run_needs_no_space_for_what_is_there(small_disk: Path) -> None:
    """As much as the interrupted pack has: its files are taken over, or removed."""
    target = small_disk / "pack"
    target.mkdir()
    (target / "pack.journal").touch()
    (target / "experts-00000.bin").write_bytes(bytes(600 << 10))
    with pytest.raises(MachineError, match="not enough space"):
        pack_model(first_shard("qwen3moe"), small_disk / "other", layers="0", dry_run=True)
    kept = pack_model(first_shard("qwen3moe"), target, layers="0", dry_run=True, resume=True)
    assert kept.dry_run


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
            pack_model(first_shard("qwen3moe"), target, dry_run=dry_run)
        messages.append((str(caught.value), caught.value.hint))
    assert messages[0] == messages[1]


def test_sources_layouts_hotness_and_layers_may_be_named_or_given(tmp_path: Path) -> None:
    named = tmp_path / "named"
    pack_model(str(first_shard("qwen3moe")), str(named), hotness=HOTNESS, layers="1")
    given = tmp_path / "given"
    pack_model(
        shards_of("qwen3moe"),
        given,
        layout=layout.load(layout.DEFAULT),
        hotness=load(str(HOTNESS)),
        layers=iter([1]),
    )
    assert contents(named) == contents(given)
    with moepack.open(given) as pack:
        assert pack.manifest.layers == [1]
        assert pack.manifest.hotness is not None
        assert pack.manifest.hotness["measured_blob_count"] == 16


@pytest.mark.parametrize("name", ["qwen3moe-hotness.csv", "qwen3moe-trace.csv", "a recording"])
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


def test_all_layers_however_they_are_named_are_all(tmp_path: Path) -> None:
    for number, layers in enumerate((None, "0-1", [1, 0])):
        pack_model(first_shard("qwen3moe"), tmp_path / str(number), layers=layers)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "0")


@pytest.mark.parametrize("layers", ["", "1-", "3-1", "x", "0-99999", []])
def test_what_is_no_list_of_layers_is_refused(layers: str | list[int], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="layers"):
        pack_model(first_shard("qwen3moe"), tmp_path / "pack", layers=layers)
    assert not (tmp_path / "pack").exists()


def test_hotness_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such expert"):
        pack_model(first_shard("qwen3moe"), tmp_path / "pack", hotness=hotness_of({(0, 16): 1}))
    assert not (tmp_path / "pack").exists()


def test_hotness_of_a_recording_knows_its_model(tmp_path: Path) -> None:
    """A model with fewer experts names none that a larger one has not."""
    small = moe((0, 1), 2).write(tmp_path / "small.gguf")
    origin = Origin("recorded", "small.gguf", expert_counts=moepack.shape_of(small).expert_counts)
    hotness = hotness_of({(0, 1): 1})._replace(origins=(origin.to_json(),))
    pack_model(small, tmp_path / "pack", hotness=hotness)
    with pytest.raises(TraceError, match="counted on another model"):
        pack_model(first_shard("qwen3moe"), tmp_path / "other", hotness=hotness)


def test_prediction_layers_are_left_out_when_asked(tmp_path: Path) -> None:
    builder = moe((0, 1, 2)).put("qwen3moe.nextn_predict_layers", "u32", 1)
    path = builder.write(tmp_path / "m.gguf")
    assert pack_model(path, tmp_path / "all").layers == (0, 1, 2)
    assert pack_model(path, tmp_path / "less", mtp=False).layers == (0, 1)
    with pytest.raises(RequestError, match="no layers are left"):
        pack_model(path, tmp_path / "none", mtp=False, layers=[2])


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    summary = pack_model(
        first_shard("qwen3moe"), tmp_path / "pack", progress=lambda *step: steps.append(step)
    )
    assert {total for _, total in steps} == {summary.data_length}
    assert sum(done for done, _ in steps) == summary.data_length
    steps.clear()
    report = verify(tmp_path / "pack", progress=lambda *step: steps.append(step))
    assert {total for _, total in steps} == {summary.data_length}
    assert sum(done for done, _ in steps) == report.read_length == summary.data_length


@pytest.mark.parametrize("strong", [False, True])
def test_no_more_is_done_than_there_is_to_do_in_several_phases(
    strong: bool, tmp_path: Path
) -> None:
    """The source is read for its SHA-256 first, and a pack that knows them is read twice."""
    steps: list[tuple[int, int]] = []

    def note(count: int, total: int) -> None:
        steps.append((count, total))
        assert sum(done for done, _ in steps) <= total

    path = tmp_path / "pack"
    pack_model(first_shard("qwen3moe"), path, sha256=True, strong=strong, progress=note)
    assert sum(done for done, _ in steps) == steps[-1][1]
    assert len({total for _, total in steps}) == 1, "all of it is known from the beginning"
    steps.clear()
    verify(path, progress=note)
    assert sum(done for done, _ in steps) == steps[-1][1]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_refused_is_refused_before_there_is_a_plan(in_place: bool, tmp_path: Path) -> None:
    """And before the source is read for its SHA-256."""
    for shard in shards_of("qwen3moe"):
        shutil.copy(shard, tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine").touch()
    plans: list[object] = []
    source = next(tmp_path.glob("*-00001-of-*.gguf"))
    with pytest.raises(RequestError, match="not empty"):
        pack_model(
            source,
            tmp_path / "pack",
            in_place=in_place,
            sha256=not in_place,
            planned=plans.append,
            progress=lambda *step: plans.append(step),
        )
    assert plans == []
