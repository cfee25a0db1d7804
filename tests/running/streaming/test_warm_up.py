"""Experts that were used most in earlier runs are read ahead, and change no answer."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from tests.support.children import wait_until
from tests.support.gguf_builder import F32, moe
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.supervised import (
    SLOTS,
    Alone,
    Form,
    Program,
    Supervised,
    answers,
    slot_lengths,
    supervised,
)

MODEL = first_shard("qwen3moe")
MOST_USED = [ExpertKey(number % 2, number) for number in range(15, -1, -1)]
"""Eight of each of two layers."""
EVERY = [ExpertKey(layer, expert) for layer in range(2) for expert in range(16)]
LENGTHS = slot_lengths(MODEL)
MEMORY = 1_400_000
Preloaded = Callable[[str], Path]


def length_of(keys: Sequence[ExpertKey]) -> int:
    return sum(LENGTHS[key] for key in keys)


def shares_of(keys: Sequence[ExpertKey]) -> dict[ExpertKey, float]:
    """Return shares of tokens that fall from key to key; none is worth a whole use."""
    return {key: 0.05 / (number + 1) for number, key in enumerate(keys)}


def first_within(keys: Sequence[ExpertKey], length: int) -> Sequence[ExpertKey]:
    return keys[: max(count for count in range(len(keys) + 1) if length_of(keys[:count]) <= length)]


def budget_of(run: Supervised) -> int:
    """Return the bytes of the cache: those of the largest expert's token are set aside."""
    return run.supervisor.budget - 4 * max(LENGTHS.values())


@contextmanager
def warm(
    ggml: Path, *, keys: Sequence[ExpertKey] = MOST_USED, count: int | None = None, **options: Any
) -> Iterator[tuple[Supervised, Program]]:
    """Yield a program that has read the most used experts, `count` if not all that fit."""
    fixed = {"memory": MEMORY, "micro_batch": 1, "prefetch": False}
    options = {**fixed, "most_used": shares_of(keys), **options}
    with supervised(MODEL, **options) as run, run.chooser(ggml, MODEL) as program:
        there = first_within(keys, budget_of(run)) if count is None else keys[:count]
        wait_until(lambda: run.supervisor.usage.expert_length == length_of(there))
        yield run, program


def misses(run: Supervised, program: Program, keys: Sequence[ExpertKey]) -> int:
    """Have routers select experts, one after another; return how many were missing."""
    before = run.supervisor.usage.miss_count
    assert program.call([(0, key.layer, [[key.expert]], 1) for key in keys]) == [[0] * len(keys)]
    return run.supervisor.usage.miss_count - before


def test_what_was_used_most_hits_at_once_and_is_nobodys_miss(ggml: Path) -> None:
    with warm(ggml, count=16) as (run, program):
        before = run.supervisor.usage
        assert (before.hit_count, before.miss_count) == (0, 0)
        assert before.read_seconds == 0, "nobody waited"
        assert before.read_length > 0
        assert program.call([(0, 0, [[15 - 1, 12, 10, 8]], 4)]) == [[0]]
        assert program.call([(0, 1, [[15, 13, 11, 0]], 4)]) == [[0]]
        usage = run.supervisor.usage
    assert (usage.hit_count, usage.miss_count) == (7, 1)


@pytest.mark.parametrize("memory", ["floor", 500_000, 700_000])
def test_no_more_is_read_than_there_is_memory_for_and_the_first_first(
    ggml: Path, memory: str | int
) -> None:
    with warm(ggml, memory=memory) as (run, program):
        there = first_within(MOST_USED, budget_of(run))
        assert 2 < len(there) < len(MOST_USED)
        assert misses(run, program, there) == 0


def test_of_memory_that_is_merely_free_half_is_left_to_the_program(ggml: Path) -> None:
    with warm(ggml, memory=None, keys=EVERY, count=17) as (run, _):
        assert length_of(EVERY[:17]) <= budget_of(run) // 2 < length_of(EVERY[:18])


def test_what_was_used_least_is_evicted_first(ggml: Path) -> None:
    with warm(ggml, memory=900_000) as (run, program):
        there = first_within(MOST_USED, budget_of(run))
        assert misses(run, program, [ExpertKey(0, 1), ExpertKey(0, 3)]) == 2
        assert misses(run, program, there[: len(there) // 2]) == 0
        assert misses(run, program, there[-1:]) == 1


def test_it_ends_when_a_router_chooses(ggml: Path, preloaded: Preloaded, tmp_path: Path) -> None:
    """What is being read comes to its end, and no more is begun."""
    model = moe((0, 1), 24, ne=(512, 512), type_id=F32, block=(1, 4)).write(tmp_path / "m.gguf")
    every = [ExpertKey(layer, expert) for layer in (0, 1) for expert in range(24)]
    (tmp_path / "faults").write_text(f"slow 100 0 {1 << 40}")
    options: Any = {"memory": 1 << 30, "micro_batch": 1, "most_used": shares_of(every)}
    faults = {"FAULTY_READS": str(tmp_path / "faults")}
    with (
        supervised(model, backend="buffered", **options) as run,
        run.chooser(ggml, model, preloaded("faulty_reads"), **faults) as program,
    ):
        wait_until(lambda: run.supervisor.usage.expert_length > 0)
        length, whole = run.supervisor.warm_up_progress or (0, 0)
        assert 0 < length < whole == sum(slot_lengths(model).values())
        assert program.call([(0, 1, [[23]], 1)]) == [[0]]
        assert run.supervisor.warm_up_progress is None
        usage = run.supervisor.usage
        assert usage.miss_count == 1
        assert usage.read_length < 90 << 20, "of 144 MiB"
        (tmp_path / "faults").unlink()
        assert program.call([(0, 1, [list(range(20, 24))], 4)]) == [[0]]
        time.sleep(0.3)  # the rest would come in less
        assert run.supervisor.usage.read_length < 100 << 20


@pytest.mark.parametrize(("policy", "stays"), [("lrfu", True), ("lru", False)])
def test_experts_of_many_tokens_outlast_those_used_now_and_then(
    ggml: Path, policy: str, stays: bool
) -> None:
    shares = {**shares_of(MOST_USED), **dict.fromkeys(MOST_USED[:2], 1.0)}
    with warm(ggml, memory=900_000, policy=policy, most_used=shares) as (run, program):
        for _ in range(3):
            graphs = [(0, 0, [[one, one + 1]], 2) for one in range(0, 13, 2)]
            assert program.call(graphs) == [[0] * len(graphs)]
        assert misses(run, program, MOST_USED[:2]) == (0 if stays else 2)


@needs_llama
@pytest.mark.parametrize("kind", ["gguf", "pack"])
def test_answers_are_those_of_the_program_alone(form: Form, alone: Alone, kind: str) -> None:
    options: Any = {"memory": "floor", "micro_batch": 32, "most_used": shares_of(MOST_USED)}
    with supervised(form("qwen3moe", kind), **options) as run, run.program(*SLOTS) as program:
        assert answers(program) == alone("qwen3moe")
    assert not run.failures


def test_an_expert_that_cannot_be_read_is_nobodys_failure_until_it_is_needed(
    ggml: Path, preloaded: Preloaded, tmp_path: Path
) -> None:
    model = moe((0, 1), 16).write(tmp_path / "m.gguf")
    with open_model([model]) as pack:
        part = pack.locate(*MOST_USED[0], "ffn_up_exps.weight")
    fault = f"errno {errno.EIO} {part.offset} {part.offset + part.length}"
    (tmp_path / "faults").write_text(fault)
    options: Any = {"memory": MEMORY, "micro_batch": 1, "most_used": shares_of(MOST_USED)}
    faults = {"FAULTY_READS": str(tmp_path / "faults")}
    with (
        supervised(model, backend="buffered", **options) as run,
        run.chooser(ggml, model, preloaded("faulty_reads"), **faults) as program,
    ):
        length = sum(slot_lengths(model)[key] for key in MOST_USED[1:])
        wait_until(lambda: run.supervisor.usage.expert_length == length)
        run.settle()
        assert not run.failures
        assert misses(run, program, MOST_USED[1:]) == 0
        assert program.call([(0, MOST_USED[0].layer, [[MOST_USED[0].expert]], 1)]) == [[-1]]
        run.settle()
        assert len(run.failures) == 1
