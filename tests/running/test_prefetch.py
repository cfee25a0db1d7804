"""Experts are read before a router chooses them: right guesses help, wrong ones harm nothing."""

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.errors import MachineError
from moepack.llama_cpp.gates import Gate, find_gate
from moepack.running.engine import Engine
from moepack.running.prefetch import _Trial, reserve_length
from tests.support import runs
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.models import REAL_MODELS, first_shard
from tests.support.needs import needs_llama
from tests.support.runs import BATCHES, LEAST, run

pytestmark = needs_llama
AHEAD = LEAST._replace(prefetch="on")


@pytest.mark.parametrize("model", sorted({*REAL_MODELS} - {"deepseek2"}))  # it has groups
def test_a_gate_chooses_what_its_router_chose(model: str, packs: dict[str, Path]) -> None:
    with moepack.open(packs[model]) as pack, Engine(pack, LEAST) as engine:
        routers = engine._routers
        guesses: list[tuple[int, set[int], set[int]]] = []

        def passed(layer: int, topk: int) -> None:
            gate = find_gate(engine._library, topk)
            assert gate is not None
            chosen = set(routers.chosen[layer].values)
            guesses.append((layer, set(gate.best(gate.given[0], len(chosen))), chosen))

        routers.passed = passed
        run(engine)
        layers = set(engine.shape.routed)
    assert {layer for layer, _, _ in guesses} == layers
    assert all(guessed == chosen for _, guessed, chosen in guesses)


@pytest.mark.parametrize("policy", ["lru", "layer+lfu"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_logits_are_the_same_with_experts_read_ahead(
    model: str, policy: str, packs: dict[str, Path]
) -> None:
    options = AHEAD._replace(policy=policy)
    with moepack.open(packs[model]) as pack, Engine(pack, options) as engine:
        assert engine.memory.reserve == reserve_length(engine.shape) > 0
        found, batch_count, usage = run(engine), engine.batch_count, engine.usage
    assert 0 < usage.prefetched_count < usage.tally.miss_count
    assert usage.wasted_length > 0
    assert all(map(np.array_equal, found, runs.loaded(first_shard(model), batch_count)))


def test_memory_is_kept_for_it_only_where_something_is_read_and_the_floor_is_left(
    packs: dict[str, Path],
) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        with Engine(pack, LEAST) as engine:
            assert engine.memory.reserve == 0
            floor = sum(engine.memory[:3])
            length = reserve_length(engine.shape)
        with Engine(pack, AHEAD) as engine:
            assert engine.memory.reserve == length
            assert sum(engine.memory[:3]) <= floor + length
        enough = floor + 2 * length  # a part of it goes to a context for larger batches
        for options, reserve in (
            (LEAST._replace(memory=enough), length),
            (LEAST._replace(memory=enough, prefetch="off"), length),
            (AHEAD._replace(memory=None), 0),
        ):
            with Engine(pack, options) as engine:
                assert engine.memory.reserve == reserve


@pytest.mark.parametrize("backend", ["buffered", "direct", "uring"])
def test_a_drive_that_fails_now_and_then_gives_no_wrong_bytes(
    backend: str, packs: dict[str, Path]
) -> None:
    with moepack.open(packs["mixtral"]) as pack:
        with Engine(pack, AHEAD) as engine:
            right = run(engine)
        fault = Fault(code=5, times=0)
        drive = FaultyBackend(make(backend), fault)
        with Engine(pack, AHEAD._replace(backend=drive)) as engine:
            engine.feed(BATCHES[0])
            failures = 0
            for number in range(12):
                fault.times = 1 + number % 3
                engine.rewind(len(BATCHES[0]))
                try:
                    for batch in BATCHES[1:]:
                        engine.feed(batch)
                except MachineError:
                    failures += 1
                fault.times = 0
            assert failures > 0
            assert all(map(np.array_equal, run(engine), right))


def feed_again_and_again(engine: Engine) -> None:
    for number in range(1000):
        engine.feed([number % 200 + 3])
        engine.rewind(len(BATCHES[0]))


def test_an_interruption_leaves_nothing_in_flight(packs: dict[str, Path]) -> None:
    with moepack.open(packs["mixtral"]) as pack:
        with Engine(pack, AHEAD) as engine:
            right = run(engine)
        slow = Fault(delay=0.02, times=0)
        drive = FaultyBackend(make("buffered"), slow)
        with Engine(pack, AHEAD._replace(backend=drive)) as engine:
            for delay in (0.05, 0.11, 0.17):
                engine.rewind(0)
                engine.feed(BATCHES[0])
                slow.times = None
                timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    feed_again_and_again(engine)
                slow.times = 0
                assert not engine._store._expected.keys
            assert all(map(np.array_equal, run(engine), right))


def tried(seconds: dict[bool, float], count: int) -> list[bool]:
    """Return for each token whether it was computed with prefetching, when it takes so long."""
    trial, is_on, found = _Trial(), True, []
    for _ in range(count):
        found.append(is_on)
        is_on = trial.decide(is_on, seconds[is_on])
    return found


@pytest.mark.parametrize(
    ("on", "off", "is_on"), [(1.0, 1.1, True), (1.1, 1.0, False), (1.0, 1.0, False)]
)
def test_it_goes_on_as_tokens_came_faster_and_looks_again(
    on: float, off: float, is_on: bool
) -> None:
    found = tried({True: on, False: off}, 600)
    assert found[:4] == [True, False, True, False]
    assert found[40:240] == [is_on] * 200
    again = found[260:280]
    assert True in again
    assert False in again
    assert found[300:500] == [is_on] * 200


def test_biases_and_scores_count_as_in_the_router() -> None:
    weights = np.array([[1, 0], [0, 1], [1, 1], [-1, -1]], np.float32)
    given = np.array([2, 1], np.float32)

    def best(**biases: Any) -> set[int]:
        gate = Gate(weights, given[None], biases.get("logit"), biases.get("score"))
        return set(gate.best(given, 2))

    assert best() == {0, 2}
    assert best(logit=np.array([0, 5, 0, 0], np.float32)) == {1, 2}
    assert best(score=np.array([0, 0, 0, 1], np.float32)) == {2, 3}
    assert set(Gate(weights, given[None], None, None).best(given, 9)) == {0, 1, 2, 3}
