"""Routed experts are counted, and kept however runs end; the next one begins with them."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import MoepackError
from moepack.pack.opening.open_model import open_model
from moepack.running.programs.learned import VARIABLE, Learner, make_learner
from moepack.running.programs.runner import open_supervisor, serving, write_selections
from moepack.running.streaming.control import ExpertUsage
from moepack.running.streaming.supervisor import StreamingOptions
from moepack.traces.hotness.learned import Learned, LearnedStore
from tests.support.children import wait_until
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.supervised import Command, chooser

MODEL = first_shard("qwen3moe")
LAYERS, EXPERTS = 2, 16
HOT = (1, 6, 11)
MEMORY = 880 << 10


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "state" / "moepack" / "learned"


def graphs(token_count: int, *, hot: int, seed: int = 0) -> list[Any]:
    """Return selections of a program: some of HOT mostly, as `hot` of nine draws are."""
    draw = random.Random(seed)
    weights = [hot if expert in HOT else 1 for expert in range(EXPERTS)]
    selections = []
    for _ in range(token_count):
        for layer in range(LAYERS):
            row: list[int] = []
            while len(row) < 4:
                expert = draw.choices(range(EXPERTS), weights)[0]
                row += [expert] * (expert not in row)
            selections.append((0, layer, [row], 4))
    return selections


def count(learner: Learner, routed: list[Any], *, is_last: bool = True) -> None:
    """Count selections as `graphs` has them, and write them."""
    for _, layer, rows, _ in routed:
        learner.add(layer, len(rows), rows[0])
    learner.write(is_last=is_last)


def run_once(
    ggml: Path, *calls: list[Any], learn: bool = True, memory: int = MEMORY
) -> ExpertUsage:
    """Run a program with a learner; return its usage."""
    failures: list[MoepackError] = []
    with open_model([MODEL]) as pack:
        learner = make_learner(pack, learn=learn, notice=pytest.fail)
        options, single = StreamingOptions(memory), ("-ub", "1")
        with open_supervisor(pack, options, single, failures.append, None, learner) as supervisor:
            write = partial(write_selections, supervisor, None, learner)
            with serving(supervisor, write), chooser(ggml, MODEL, supervisor) as program:
                is_warmed = learner is None or not learner.most_used
                wait_until(lambda: is_warmed or supervisor.usage.read_length > 0)
                wait_until(lambda: not supervisor.warm_up_progress)
                for call in calls:
                    assert program.call(call) == [[0] * len(call)]
            write(is_last=True)
            assert not failures
            return supervisor.final_usage


def miss_share(usage: ExpertUsage) -> float:
    return usage.miss_count / (usage.hit_count + usage.miss_count)


def learned() -> Learned:
    with open_model(MODEL) as pack:
        return LearnedStore(pack).read()


def test_the_next_run_begins_with_the_most_used_experts(ggml: Path) -> None:
    first = run_once(ggml, graphs(200, hot=60))
    assert learned().token_count == 200
    assert {key.expert for key in list(learned().shares())[:6]} == set(HOT)
    short = graphs(3, hot=60, seed=9)
    warm, cold = run_once(ggml, short), run_once(ggml, short, learn=False)
    assert miss_share(warm) < miss_share(cold) - 0.15
    assert miss_share(first) < miss_share(cold)
    assert learned().token_count == 203


def test_nothing_is_used_of_a_uniform_router(ggml: Path) -> None:
    run_once(ggml, graphs(300, hot=1))
    assert learned().token_count == 300
    with open_model(MODEL) as pack:
        learner = make_learner(pack)
    assert learner is not None
    assert learner.most_used == {}


@pytest.mark.parametrize("value", ["0", "Off", "no "])
def test_it_is_switched_off_by_a_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with open_model(MODEL) as pack:
        assert make_learner(pack) is None


def test_nothing_more_is_counted_while_all_experts_stay_in_memory(ggml: Path) -> None:
    """Counting would cost the time that is gained by not announcing selections."""
    every = [(0, layer, [list(range(EXPERTS))], EXPERTS) for layer in range(LAYERS)]
    usage = run_once(ggml, every, graphs(100, hot=9), memory=64 << 20)
    assert usage.hit_count + usage.miss_count == LAYERS * EXPERTS
    assert learned().token_count == 0


@contextmanager
def running(ggml: Path, *options: str) -> Iterator[Command]:
    """Run the command with a program that has selected experts of 80 tokens."""
    with open_model([MODEL]) as pack:
        shard = pack.locate(0, 0, "ffn_gate_exps.weight").path
    program = [sys.executable, "-m", "tests.support.chooser", str(shard), str(ggml)]
    words = ["--memory", "880KiB", *options, "--", *program, str(os.path.getsize(shard))]
    with Command(MODEL, *words, LLAMA_ARG_UBATCH="1") as run:
        assert run.call(graphs(80, hot=9)) == [[0] * 80 * LAYERS]
        yield run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_has_learned(ggml: Path, number: int) -> None:
    with running(ggml) as run:
        os.killpg(run.process.pid, number)
    assert learned().token_count == 80


def test_it_is_switched_off_by_an_option(ggml: Path, state: Path) -> None:
    with running(ggml, "--no-learn"):
        pass
    assert not state.exists()


def test_steps_of_many_tokens_are_not_counted(ggml: Path) -> None:
    """They use most experts, whichever decoding uses most."""
    many = [(0, layer, [[1, 2, 3, 4]] * 17, 4) for layer in range(LAYERS)] * 3
    few = [(0, layer, [[1, 2, 3, 4]] * 16, 4) for layer in range(LAYERS)] * 3
    run_once(ggml, many + few)
    assert learned().token_count == 48


def learn_from(token_count: int, notice: Callable[[str], None] = pytest.fail) -> None:
    """Have a learner count selections, as in a run."""
    with open_model(MODEL) as pack:
        learner = make_learner(pack, notice=notice)
        assert learner is not None
        count(learner, graphs(token_count, hot=60))


def test_counts_that_cannot_be_kept_are_reported_once_and_end_no_run(state: Path) -> None:
    notes: list[str] = []
    with open_model(MODEL) as pack:
        learner = make_learner(pack, notice=notes.append)
        assert learner is not None
        (path := LearnedStore(pack).path).mkdir()
        for seed in range(2):
            count(learner, graphs(50, hot=9, seed=seed))
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert "the counts of this run are not kept" in notes[0]


def test_counts_are_written_now_and_then_so_that_a_kill_loses_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("moepack.running.programs.learned.time.monotonic", lambda: clock[0])
    with open_model(MODEL) as pack:
        store = LearnedStore(pack)
        learner = Learner(store, pytest.fail)
        for seed, (seconds, expected) in enumerate([(60, 0), (61, 64), (60, 64), (61, 128)]):
            clock[0] += seconds
            count(learner, graphs(40, hot=9, seed=seed), is_last=False)
            assert store.read().token_count == expected
        learner.write(is_last=True)
        assert store.read().token_count == 160


def test_without_a_folder_of_the_user_nothing_is_learned_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with open_model(MODEL) as pack:
        assert make_learner(pack, notice=pytest.fail) is None


@needs_llama
def test_a_served_model_learns_in_python_too(state: Path) -> None:
    options = ["-c", "256", "-np", "1", "-t", "1"]
    for learn in (True, False):
        with moepack.serve(MODEL, memory="floor", options=options, learn=learn) as server:
            assert "".join(server.client.complete("Hello", count=60))
        assert 50 <= learned().token_count <= 80


def test_counts_are_shown_written_used_to_rank_and_forgotten(
    pack_copy: Path, cli: Callable[..., Any], tmp_path: Path
) -> None:
    empty = cli("hotness", "--learned", MODEL)
    assert empty.stdout.startswith("nothing was learned about this model yet")
    nothing = cli("rank", pack_copy, "--learned")
    assert nothing.returncode == 3
    assert "nothing was counted yet" in nothing.stderr
    learn_from(400)
    shown = cli("hotness", "--learned", pack_copy)
    assert shown.stdout.startswith("3,200 selections of ")
    assert "over 400 tokens since 20" in shown.stdout
    assert "begin with the most used experts\n" in shown.stdout
    facts = json.loads(cli("hotness", "--learned", MODEL, "--json").stdout)
    assert facts["token_count"] == 400
    assert facts["selection_count"] == 3200
    assert facts["is_warming"]
    assert facts["verdict"] in facts["reason"] or facts["verdict"] in ("static", "recency")
    written = cli("hotness", "--learned", MODEL, "-o", tmp_path / "hot.csv", "-q")
    assert (written.returncode, written.stdout) == (0, "")
    ranked = cli("rank", pack_copy, "--learned")
    assert ranked.returncode == 0
    again = cli("rank", pack_copy, "--hotness", tmp_path / "hot.csv", "--json")
    assert not json.loads(again.stdout)["is_changed"], "they are the same counts"
    with moepack.open(pack_copy) as pack:
        assert {key.expert for key in pack.hottest(250_000)} <= set(HOT)
    assert cli("models", "rm", MODEL, "--only", "learned", "--yes").returncode == 0
    assert moepack.learned_facts(MODEL).since is None
    assert not moepack.forget_learned(MODEL)


@pytest.mark.parametrize(
    "arguments",
    [
        ("hotness",),
        ("hotness", "--learned", MODEL, MODEL),
        ("rank", "pack"),
        ("rank", "pack", "--learned", "--hotness", MODEL),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    cli: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    end = cli(*arguments)
    assert end.returncode == 2
    assert end.stderr.startswith("error: ")
