"""What runs choose is counted, and kept however they end; the next one begins with it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.hotness.learned import Learned
from moepack.hotness.learned_store import LearnedStore
from moepack.packing.opening import open_model
from moepack.pager.client import Choice
from moepack.programs import learner as learning
from moepack.programs.learner import Learner, is_learning, make_learner
from tests.support.children import PATIENCE
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama
from tests.support.pagers import ROOT

pytestmark = pytest.mark.long

MODEL = first_shard("qwen3moe")
LAYERS, EXPERTS = 2, 16
HOT = (1, 6, 11)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(learning.VARIABLE)
    return tmp_path / "state" / "moepack" / "learned"


def graphs(token_count: int, *, hot: int, seed: int = 0) -> list[Any]:
    """Return what a program chooses: some of HOT mostly, as `hot` of nine draws are."""
    draw = random.Random(seed)
    weights = [hot if expert in HOT else 1 for expert in range(EXPERTS)]
    chosen = []
    for _ in range(token_count):
        for layer in range(LAYERS):
            row: list[int] = []
            while len(row) < 4:
                expert = draw.choices(range(EXPERTS), weights)[0]
                row += [expert] * (expert not in row)
            chosen.append((0, layer, [row], 4))
    return chosen


class FewUses:
    """A pager as a learner sees it, in which so many tokens chose as `graphs` says."""

    def __init__(self, chosen: list[Any]) -> None:
        self.uses = [Choice(layer, len(rows), rows[0], False) for _, layer, rows, _ in chosen]

    def take_uses(self) -> list[Choice]:
        uses, self.uses = self.uses, []
        return uses


@contextmanager
def running(ggml: Path, *options: str, **names: str) -> Any:
    """Run the command with a program that chooses, and that waits for what it is to choose."""
    with open_model([MODEL]) as pack:
        shard = pack.locate(0, 0, "ffn_gate_exps.weight").path
    command = [sys.executable, "-m", "moepack", "run", str(MODEL), *options, "--"]
    command += [sys.executable, "-m", "tests.support.chooser", str(shard), str(ggml)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "LLAMA_ARG_UBATCH": "1", **names}
    with subprocess.Popen(
        [*command, str(os.path.getsize(shard))],
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        **pipes,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def choose(process: "subprocess.Popen[str]", chosen: list[Any]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([chosen]) + "\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == [[0] * len(chosen)]


def run_once(ggml: Path, chosen: list[Any], *options: str, **names: str) -> str:
    """Run a program that chooses something; return what the command says in the end."""
    options = options or ("--memory", "880KiB")
    with running(ggml, *options, **names) as process:
        time.sleep(0.3)  # it loads
        choose(process, chosen)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        return str(errors)


def misses(errors: str) -> float:
    line = next(line for line in errors.splitlines() if line.startswith("experts: "))
    share = line.split("%")[0].removeprefix("experts: ")
    return 1 - float(share) / 100


def learned() -> Learned:
    with open_model(MODEL) as pack:
        return LearnedStore(pack).read()


def test_the_next_run_begins_with_what_was_used_most(ggml: Path) -> None:
    first = run_once(ggml, graphs(200, hot=60))
    assert learned().token_count == 200
    assert {key.expert for key in learned().hottest_first()[:6]} == set(HOT)
    short = graphs(3, hot=60, seed=9)
    warm = run_once(ggml, short)
    cold = run_once(ggml, short, "--memory", "880KiB", "--no-learn")
    assert misses(warm) < misses(cold) - 0.15
    assert misses(first) < misses(cold)
    assert learned().token_count == 203


def test_of_an_even_router_nothing_is_used(ggml: Path) -> None:
    run_once(ggml, graphs(300, hot=1))
    assert learned().token_count == 300
    with open_model(MODEL) as pack:
        learner = make_learner(pack)
    assert learner is not None
    assert learner.most_used == ((), False)
    short = graphs(3, hot=1, seed=9)
    assert misses(run_once(ggml, short)) == misses(
        run_once(ggml, short, "--memory", "880KiB", "--no-learn")
    )


@pytest.mark.parametrize("names", [{}, {"MOEPACK_LEARN": "0"}, {"MOEPACK_LEARN": "Off"}])
def test_it_is_switched_off_by_an_option_and_by_a_variable(
    ggml: Path, state: Path, names: dict[str, str]
) -> None:
    options = () if names else ("--no-learn",)
    run_once(ggml, graphs(60, hot=9), *options, **names)
    assert not state.exists()
    assert not is_learning({"MOEPACK_LEARN": "no "})
    assert is_learning({"MOEPACK_LEARN": "1"})


def test_where_all_experts_stay_in_memory_nothing_more_is_counted(ggml: Path) -> None:
    """Counting would cost what is gained by not asking what was chosen."""
    every = [(0, layer, [list(range(EXPERTS))], EXPERTS) for layer in range(LAYERS)]
    with running(ggml, "--memory", "64MiB") as process:
        choose(process, every)
        choose(process, graphs(100, hot=9))
        process.communicate(timeout=PATIENCE)
    assert learned().token_count == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_has_learned(ggml: Path, number: int) -> None:
    with running(ggml, "--memory", "880KiB") as process:
        choose(process, graphs(80, hot=9))
        os.killpg(process.pid, number)
        process.communicate(timeout=PATIENCE)
    assert learned().token_count == 80


def test_steps_of_many_tokens_are_not_counted(ggml: Path) -> None:
    """They use most experts, and say nothing of what decoding uses most."""
    many = [(0, layer, [[1, 2, 3, 4]] * 17, 4) for layer in range(LAYERS)] * 3
    few = [(0, layer, [[1, 2, 3, 4]] * 16, 4) for layer in range(LAYERS)] * 3
    run_once(ggml, many + few)
    assert learned().token_count == 48


def test_a_damaged_file_is_said_in_a_sentence_and_begun_anew(ggml: Path, state: Path) -> None:
    run_once(ggml, graphs(200, hot=60))
    (path,) = state.iterdir()
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    errors = run_once(ggml, graphs(70, hot=60))
    notes = [line for line in errors.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert f"{path}: learned counts that are damaged" in notes[0]
    assert learned().token_count == 70


def test_what_cannot_be_kept_is_said_once_and_ends_no_run(state: Path) -> None:
    notes: list[str] = []
    with open_model(MODEL) as pack:
        learner = make_learner(pack, notice=notes.append)
        assert learner is not None
        (path := LearnedStore(pack).path).mkdir()
        for seed in range(2):
            learner.write(FewUses(graphs(50, hot=9, seed=seed)), is_last=True)  # type: ignore[arg-type]
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert "what was learned is not kept" in notes[0]


def test_it_is_written_now_and_then_so_that_a_kill_loses_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("moepack.programs.learner.time.monotonic", lambda: clock[0])
    with open_model(MODEL) as pack:
        store = LearnedStore(pack)
        learner = Learner(store, pytest.fail)
        for seed, (seconds, expected) in enumerate([(60, 0), (61, 64), (60, 64), (61, 128)]):
            clock[0] += seconds
            chosen = graphs(40, hot=9, seed=seed)
            learner.write(FewUses(chosen))  # type: ignore[arg-type]
            assert store.read().token_count == expected
        learner.write(FewUses([]), is_last=True)  # type: ignore[arg-type]
        assert store.read().token_count == 160


def test_where_the_user_has_no_folder_nothing_is_learned_and_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with open_model(MODEL) as pack:
        assert make_learner(pack, notice=pytest.fail) is None


@needs_llama
def test_a_served_model_learns_in_python_too(state: Path) -> None:
    options = ["-c", "256", "-np", "1", "-t", "1"]
    with moepack.serve(MODEL, memory="floor", options=options) as server:
        assert "".join(server.client.complete("Hello", count=60))
    assert 50 <= learned().token_count <= 80
    with moepack.serve(MODEL, memory="floor", options=options, learn=False) as server:
        assert "".join(server.client.complete("Hello", count=60))
    assert 50 <= learned().token_count <= 80


def test_shards_in_another_folder_are_the_same_model(ggml: Path, tmp_path: Path) -> None:
    run_once(ggml, graphs(60, hot=9))
    (tmp_path / "other").mkdir()
    for shard in map(Path, shards_of("qwen3moe")):
        (tmp_path / "other" / shard.name).symlink_to(shard)
    facts = moepack.learned_facts(tmp_path / "other" / Path(MODEL).name)
    assert facts.token_count == 60


def test_it_is_shown_written_used_to_rank_and_forgotten(
    ggml: Path, pack_copy: Path, moepack_command: Callable[..., Any], tmp_path: Path
) -> None:
    empty = moepack_command("hotness", "--learned", MODEL)
    assert empty.stdout.startswith("nothing was learned of this model yet")
    nothing = moepack_command("rank", pack_copy, "--learned")
    assert nothing.returncode == 3
    assert "nothing was counted yet" in nothing.stderr
    run_once(ggml, graphs(400, hot=60))
    shown = moepack_command("hotness", "--learned", pack_copy)
    assert shown.stdout.startswith("3,200 selections of ")
    assert "over 400 tokens since 20" in shown.stdout
    assert "begin with the experts that were used most, and pin " in shown.stdout
    facts = json.loads(moepack_command("hotness", "--learned", MODEL, "--json").stdout)
    assert facts["token_count"] == 400
    assert facts["selection_count"] == 3200
    assert facts["is_warming"]
    assert facts["verdict"] in facts["reason"] or facts["verdict"] in ("static", "recency")
    written = moepack_command("hotness", "--learned", MODEL, "-o", tmp_path / "hot.csv", "-q")
    assert (written.returncode, written.stdout) == (0, "")
    ranked = moepack_command("rank", pack_copy, "--learned")
    assert ranked.returncode == 0
    again = moepack_command("rank", pack_copy, "--hotness", tmp_path / "hot.csv", "--json")
    assert not json.loads(again.stdout)["is_changed"], "they are the same counts"
    with moepack.open(pack_copy) as pack:
        assert {key.expert for key in pack.hottest(250_000)} <= set(HOT)
    assert moepack_command("hotness", "--learned", MODEL, "--forget").stdout == "forgotten\n"
    assert moepack.learned_facts(MODEL).since is None
    assert not moepack.forget_learned(MODEL)


@pytest.mark.parametrize(
    "arguments",
    [
        ("hotness", "--forget"),
        ("hotness",),
        ("hotness", "--learned", MODEL, MODEL),
        ("hotness", "--learned", MODEL, "--forget", "-o", "x.csv"),
        ("rank", "pack"),
        ("rank", "pack", "--learned", "--hotness", MODEL),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    moepack_command: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    end = moepack_command(*arguments)
    assert end.returncode == 2
    assert end.stderr.startswith("error: ")
