"""Traces, hotness and other files that come through pipes: each command reads each of them once."""

import gzip
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import moepack
from moepack.planning.footprint.model import footprint_of
from tests.support.machines import write_machine
from tests.support.models import FIXTURES, first_shard, pack_model
from tests.support.warm_command import Run

MODEL = first_shard("qwen3moe")
COMMANDS = [
    "forecast MODEL --machine box.toml --trace trace.csv --receipt run.json --budget 50%",
    "place PACK --machine box.toml --ram 2MiB --margin 0B --context 64 --trace trace.csv",
    "place PACK --machine box.toml --ram 2MiB --margin 0B --context 64 --hotness hot.csv",
    "simulate trace.csv some.csv --model MODEL --budgets 50%",
    "trace stats trace.csv --model MODEL",
    "trace concentration trace.csv.gz",
    "trace import trace.csv imatrix.gguf -o new.moetrace",
    "hotness trace.csv hot.csv imatrix.gguf -o new.csv",
    "pack MODEL --hotness imatrix.gguf -o new.moepack",
    "index MODEL --hotness hot.csv -o new.index",
    "rank COPY --hotness trace.csv",
    "report MODEL --trace trace.csv --machine box.toml --run run.json -o page.html",
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packs") / "model.moepack"
    pack_model([MODEL], target)
    return target


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with an input of each kind."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_machine(folder / "box.toml", memory=1, bandwidth=40, drive=3)
    trace = (FIXTURES / "qwen3moe-trace.csv").read_bytes()
    (folder / "trace.csv").write_bytes(trace)
    (folder / "trace.csv.gz").write_bytes(gzip.compress(trace))
    (folder / "some.csv").write_bytes(b"\n".join(trace.splitlines()[:161]) + b"\n")
    shutil.copy(FIXTURES / "qwen3moe-hotness.csv", folder / "hot.csv")
    shutil.copy(FIXTURES / "qwen3moe-Q4_K_M-imatrix-prompt.gguf", folder / "imatrix.gguf")
    run = {"backends": "CPU", "model_size": footprint_of(MODEL).weights.length, "n_gen": 128}
    (folder / "run.json").write_text(json.dumps([{**run, "n_prompt": 0, "avg_ts": 90}]))
    return folder


def pipes_of(files: Path) -> Path:
    """Return a folder of FIFOs, of which each gives a file of `files` to one reader, once."""
    folder = files.with_name("pipes")
    folder.mkdir()
    for path in files.iterdir():
        os.mkfifo(folder / path.name)
        write = (folder / path.name).write_bytes
        threading.Thread(target=write, args=(path.read_bytes(),), daemon=True).start()
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_each_input_is_read_once(cli: Run, command: str, pack: Path, files: Path) -> None:
    if command.startswith("report"):
        pytest.importorskip("jinja2")
    results = []
    pipes = pipes_of(files)
    for folder in (files, pipes):
        shutil.copytree(pack, folder / "COPY")
        names = {"MODEL": str(MODEL), "PACK": str(pack)}
        words = [names.get(word, word) for word in command.split()]
        end = cli(*words, "--json", cwd=folder, timeout=60)
        assert end.returncode == 0, end.stderr
        facts = json.loads(end.stdout)
        results.append({name: facts[name] for name in facts.keys() - {"seconds", "free_space"}})
    assert results[0] == results[1]
    for path in files.glob("new.*"):
        if path.is_file():
            assert path.read_bytes() == (pipes / path.name).read_bytes()


def test_a_trace_that_was_read_serves_several_calls(tmp_path: Path) -> None:
    trace, machine = FIXTURES / "qwen3moe-trace.csv", tmp_path / "box.toml"
    write_machine(machine, memory=1, bandwidth=40, drive=3)
    copy = tmp_path / "trace.csv"
    shutil.copy(trace, copy)
    with moepack.read_trace(copy, model=MODEL) as read:
        copy.unlink()
        assert moepack.simulate(read, budgets="50%") == moepack.simulate(
            trace, model=MODEL, budgets="50%"
        )
        assert moepack.concentration(read) == moepack.concentration(trace, model=MODEL)
        assert moepack.trace_statistics(read) == moepack.trace_statistics(trace, model=MODEL)
        first, again = (
            moepack.forecast(MODEL, machine, budget="50%", traces=one) for one in (read, trace)
        )
        assert first == again
        with pytest.raises(moepack.RequestError, match="read for another model"):
            moepack.simulate(read, model=first_shard("mixtral"))
