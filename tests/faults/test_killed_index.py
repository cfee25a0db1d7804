"""Whatever kills `moepack index`, there is no index or a whole one, and it can begin again."""

import os
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.packing.shard_index import index_model
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.models import contents


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model of several shards, with an index over them in `index`."""
    folder = tmp_path_factory.mktemp("killed") / "source"
    write_shards(split(moe((0, 1)), 3), folder)
    index_model(folder, folder.parent / "index")
    return folder


def assert_whole(target: Path, source: Path) -> None:
    assert contents(target) == contents(source.parent / "index")
    with moepack.open(target) as pack:
        assert pack.layers == (0, 1)


def leftover(target: Path) -> Path:
    """Make what a killed run of another model leaves: its links, and a file."""
    target.mkdir()
    for number in range(1, 4):
        (target / f"shard-{number:05}-of-00003.gguf").symlink_to("elsewhere")
    (target / "index.bin").write_bytes(b"half")
    return target


@pytest.mark.parametrize("name", ["index.bin", "notes", "shard-00001-of-00002.gguf", "folder/x"])
def test_what_is_not_of_a_killed_run_alone_stays(name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "index" if name == "index.bin" else leftover(tmp_path / "index")
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_bytes(b"mine")
    before = sorted(os.listdir(target))
    with pytest.raises(RequestError, match="not empty"):
        index_model(source, target)
    assert sorted(os.listdir(target)) == before


def test_another_model_may_begin_where_one_was_killed(source: Path, tmp_path: Path) -> None:
    target = leftover(tmp_path / "index")
    index_model(source, target)
    assert_whole(target, source)


def test_a_run_that_goes_on_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds what the first has made so far, as after a kill."""
    target = tmp_path / "index"
    write = os.fsync
    names: list[str] = []

    def second(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", write)
        with pytest.raises(RequestError, match="another moepack is writing here"):
            index_model(source, target)
        names.extend(os.listdir(target))
        write(descriptor)

    target.mkdir()
    monkeypatch.setattr(os, "fsync", second)
    index_model(source, target)
    assert "index.bin" in names
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
