"""A FIFO in place of any file that is read again: every command ends, and says what is there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import moepack
from moepack.pack.opening.open_model import open_model
from moepack.traces.hotness.learned import LearnedStore
from tests.support.children import run_command
from tests.support.models import FIXTURES, first_shard, shards_of
from tests.support.warm_command import Run

NAME = "qwen3moe"
MODEL = first_shard(NAME)
DEADLINE = 30
KILLED = """
import os, sys, moepack
calls = []
def progress(done, total):
    calls.append(done)
    if sum(calls) > total * float(sys.argv[4]):
        os.kill(os.getpid(), 9)
call = moepack.pack_in_place if sys.argv[3] == "in place" else moepack.pack_model
call(sys.argv[1], sys.argv[2], progress=progress)
"""
FOLLOWING = {
    "in place": (
        "pack shards -o model.moepack --in-place --resume",
        "pack shards -o model.moepack --in-place --resume --recover",
        "restore model.moepack --in-place --yes-delete-pack",
    ),
    "killed": ("pack MODEL -o model.moepack --resume", "inspect model.moepack"),
    "parts": ("pack MODEL -o model.moepack --part 2/2", "pack MODEL -o model.moepack --commit"),
    "whole": (
        "rank model.moepack --hotness HOTNESS",
        "verify model.moepack",
        "restore model.moepack -o new",
        "pack MODEL -o model.moepack --resume",
    ),
    "mirrored": (
        "mirror model.moepack --remove",
        "verify model.moepack",
        "mirror model.moepack mirror",
    ),
}
"""Commands that read what others left, by how these ended."""


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders with a model and what a command has left of its pack."""
    desks = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in FOLLOWING}
    for name, desk in desks.items():
        model, pack = MODEL, desk / "model.moepack"
        if name == "in place":
            model = desk / "shards"
            model.mkdir()
            for shard in shards_of(NAME):
                shutil.copy(shard, model)
        if name in ("in place", "killed"):
            words = (sys.executable, "-c", KILLED, model, pack, name, 0.6)
            assert run_command(*words).returncode == -9
        elif name == "parts":
            moepack.SharedPack(model, pack).write_part("1/2")
        else:
            moepack.pack_model(model, pack)
        if name == "mirrored":
            (desk / "mirror").mkdir()
            moepack.mirror_pack(pack, desk / "mirror")
    return desks


def words_of(command: str) -> list[str]:
    names = {"MODEL": str(MODEL), "HOTNESS": str(FIXTURES / "qwen3moe-hotness.csv")}
    return [names.get(word, word) for word in command.split()]


def files_of(desk: Path) -> Iterator[Path]:
    for path in sorted(desk.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.parent.name != "shards":
            yield path.relative_to(desk)


def test_learned_counts_are_read_from_a_file_alone(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with open_model(MODEL) as pack:
        os.mkfifo(LearnedStore(pack).path)
    end = cli("hotness", "--learned", MODEL, timeout=DEADLINE)
    assert (end.returncode, end.stdout) == (6, "")
    assert "a FIFO, not a regular file" in end.stderr


def test_a_branch_of_the_hubs_cache_is_read_from_a_file_alone(cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--name"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for shard in shards_of(NAME):
        shutil.copy(shard, snapshot)
    (folder / "refs").mkdir()
    os.mkfifo(folder / "refs" / "main")
    assert cli("inspect", folder, timeout=DEADLINE).returncode == 0


def copied(desk: Path, target: Path) -> Path:
    """Copy a desk, with its links to itself."""
    shutil.copytree(desk, target, symlinks=True)
    for link in filter(Path.is_symlink, target.rglob("*")):
        place = os.readlink(link)
        link.unlink()
        link.symlink_to(place.replace(str(desk), str(target)))
    return target


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_fifo_never_makes_a_command_wait(
    cli: Run, desks: dict[str, Path], tmp_path: Path, name: str
) -> None:
    for number, (file, command) in enumerate(product(files_of(desks[name]), FOLLOWING[name])):
        desk = copied(desks[name], tmp_path / str(number))
        (desk / file).unlink()
        os.mkfifo(desk / file)
        try:
            end = cli(*words_of(command), cwd=desk, timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} waits for {file}")
        assert "a bug in moepack" not in end.stderr, (command, file, end.stderr)
