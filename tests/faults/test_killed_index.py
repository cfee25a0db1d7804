"""Whatever kills `moepack index`, there is no index or a whole one, and it can begin again."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moepack
from moepack.errors import MachineError, PackError, RequestError
from moepack.packing.shard_index import index_model
from tests.support import machine_faults
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.machine_faults import Shot, needs_strace
from tests.support.models import contents


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model of several shards, with an index over them in `index`."""
    folder = tmp_path_factory.mktemp("killed") / "source"
    folder.mkdir()
    write_shards(split(moe((0, 1)), 3), folder)
    index_model(folder, folder.parent / "index")
    return folder


def assert_whole(target: Path, source: Path) -> None:
    assert contents(target) == contents(source.parent / "index")
    with moepack.open(target) as pack:
        assert pack.layers == (0, 1)


@needs_strace()
@pytest.mark.parametrize("fault", ["signal=SIGKILL", "error=EIO", "signal=SIGINT"])
def test_after_each_call_that_it_does_not_survive_it_begins_again(
    fault: str, source: Path, tmp_path: Path
) -> None:
    """Killed, failing or interrupted: at each of its calls on what it makes."""
    calls = machine_faults.record(tmp_path / "recorded", source, word="index")
    assert {"mkdir", "symlink", "write", "fsync", "rename"} <= {call.name for call in calls}
    shots = machine_faults.shots(calls)[:: 1 if fault == "signal=SIGKILL" else 2]

    def disturb(shot: Shot) -> None:
        target = tmp_path / str(shot.number)
        outcome = machine_faults.hit(shot, fault, target, source, word="index")
        killed = fault == "signal=SIGKILL"
        assert not killed or outcome.returncode == -signal.SIGKILL, shot
        if (target / "manifest.json").exists():
            assert_whole(target, source)
            return
        assert killed or not target.exists() or not os.listdir(target), shot
        if target.exists():
            with pytest.raises(PackError):
                moepack.open(target)
        index_model(source, target)
        assert_whole(target, source)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(disturb, shots))


def leftover(target: Path, count: int) -> Path:
    """Make what a killed run leaves: so many links of three, and then the files."""
    target.mkdir()
    for number in range(1, min(count, 3) + 1):
        (target / f"shard-{number:05}-of-00003.gguf").symlink_to("elsewhere")
    for name in ("index.bin", "manifest.json.tmp")[: max(0, count - 3)]:
        (target / name).write_bytes(b"half")
    return target


def test_what_is_not_of_a_killed_run_alone_stays(source: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("index.bin", "notes", "shard-00001-of-00002.gguf", "a folder")):
        target = tmp_path / str(number)
        target.mkdir()
        if number:
            leftover(target / "x", 4)
            for path in (target / "x").iterdir():
                if path.name != name:
                    path.rename(target / path.name)
                else:
                    path.unlink()
            (target / "x").rmdir()
        (target / name).mkdir() if name == "a folder" else (target / name).write_bytes(b"mine")
        before = sorted(os.listdir(target))
        with pytest.raises(RequestError, match="not empty"):
            index_model(source, target)
        assert sorted(os.listdir(target)) == before


@pytest.mark.parametrize("count", range(6))
def test_another_model_may_begin_where_one_was_killed(
    count: int, source: Path, tmp_path: Path
) -> None:
    target = leftover(tmp_path / "index", count)
    index_model(source, target)
    assert_whole(target, source)
    with pytest.raises(RequestError, match="a whole pack is here already"):
        index_model(source, target)
    assert_whole(target, source)


def test_a_run_that_goes_on_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds what the first has made so far, as after a kill."""
    target = tmp_path / "index"
    write = os.fsync
    seen: list[list[str]] = []

    def second(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", write)
        with pytest.raises(RequestError, match="another moepack is writing here"):
            index_model(source, target)
        seen.append(os.listdir(target))
        write(descriptor)

    target.mkdir()
    monkeypatch.setattr(os, "fsync", second)
    index_model(source, target)
    assert "index.bin" in seen[0]
    assert_whole(target, source)


def test_what_fails_after_the_commit_leaves_no_half_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail(old: Path, new: Path) -> None:
        replace(old, new)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MachineError):
        index_model(source, tmp_path / "index")
    assert not (tmp_path / "index").exists()
