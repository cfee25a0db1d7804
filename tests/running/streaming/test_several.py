"""Several programs, models and contexts at once share a supervisor: each has its own text."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.children import wait_until
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.supervised import (
    PROMPTS,
    SLOTS,
    Alone,
    Answers,
    Form,
    Program,
    Supervised,
    supervised,
)

pytestmark = needs_llama

TIGHT = ("--slots", 4, "--micro-batch", 4)


@pytest.fixture(params=["pack", "gguf"])
def run(form: Form, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    with supervised(form("qwen3moe", request.param), memory="floor", micro_batch=4) as one:
        yield one


@pytest.fixture(scope="module")
def tight_answers() -> Answers:
    with Program(first_shard("qwen3moe"), *TIGHT) as program:
        return program.ask(*PROMPTS[2])


def test_two_programs_with_four_texts_each_share_a_few_experts(
    run: Supervised, tight_answers: Answers
) -> None:
    most = 0
    with ExitStack() as stack:
        programs = [stack.enter_context(run.program(*TIGHT)) for _ in range(2)]
        for program in programs:
            program.begin(*PROMPTS[2])
        while any(not program.has_answered for program in programs):
            most = max(most, run.supervisor.usage.resident_length)
            time.sleep(0.001)
        assert [program.answers() for program in programs] == [tight_answers] * 2
    assert 0 < most <= 2 * run.supervisor.budget, "each has what a step of four tokens needs"
    assert run.supervisor.usage.fault_count == 0
    assert not run.failures


@pytest.mark.parametrize(
    ("ours", "another", "kind"),
    [
        ("qwen3moe", "qwen3moe", "pack"),
        ("qwen3moe", "qwen3moe", "gguf"),
        ("qwen3moe", "mixtral", "gguf"),
        ("qwen3moe", "deepseek2", "pack"),
        ("mixtral", "qwen3moe", "pack"),
    ],
)
def test_two_models_in_a_program_answer_right(
    form: Form, alone: Alone, ours: str, another: str, kind: str
) -> None:
    """The other is not brought, or brought as well: then it is the same."""
    with supervised(form(ours, kind), memory="floor", micro_batch=32) as run:
        path = run.supervisor.model_path if another == ours else first_shard(another)
        with run.program(*SLOTS, "--another", path) as program:
            assert program.ask(*PROMPTS[2]) == [alone(ours)[2], alone(another)[2]]
        assert run.supervisor.usage.fault_count == 0
        assert not run.failures


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_experts_of_one_context_are_not_evicted_for_another(form: Form, seconds: float) -> None:
    """In a pack an expert that was evicted and is read none the less would be a page fault."""
    prompt = [[number % 500 for number in range(60)]]
    with Program(first_shard("qwen3moe"), "--micro-batch", 1) as program:
        expected = program.ask(*prompt)
    with (
        supervised(form("qwen3moe", "pack"), memory="floor", micro_batch=1) as run,
        ExitStack() as stack,
    ):
        others = ["--another", run.supervisor.model_path] * 2
        programs = [stack.enter_context(run.program("--micro-batch", 1, *others)) for _ in range(2)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for program in programs:
                program.begin(*prompt)
            for program in programs:
                assert program.answers() == [expected] * 3
        assert run.supervisor.usage.fault_count == 0
        assert not run.failures


def test_a_stopped_program_holds_no_other_one_up(run: Supervised, tight_answers: Answers) -> None:
    expected = tight_answers
    with run.program(*TIGHT) as stopped, run.program(*TIGHT) as program:
        assert stopped.ask(*PROMPTS[2]) == expected
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            assert program.ask(*PROMPTS[2]) == expected
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        assert stopped.ask(*PROMPTS[2]) == expected
        assert program.ask(*PROMPTS[2]) == expected
    assert not run.failures


@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_what_is_pinned_is_read_while_a_program_loads_and_is_nobodys_miss(
    form: Form, alone: Alone, kind: str
) -> None:
    with (
        supervised(form("qwen3moe", kind), memory=1 << 30, pinned=1 << 30, micro_batch=32) as run,
        run.program(*SLOTS) as program,
    ):
        assert program.ask(*PROMPTS[2]) == alone("qwen3moe")[2]
        usage = run.supervisor.usage
    assert usage.holds_all
    assert (usage.miss_count, usage.fault_count) == (0, 0)


def test_programs_have_equal_parts_of_the_memory(form: Form) -> None:
    memory = 1_500_000
    with (
        supervised(form("qwen3moe", "pack"), memory=memory, micro_batch=4) as run,
        ExitStack() as stack,
    ):
        programs = [stack.enter_context(run.program(*TIGHT)) for _ in range(2)]
        wait_until(
            lambda: (
                [one.memory for one in run.supervisor._control.statistics()] == [memory // 2] * 2
            )
        )
        for program in programs:
            program.ask(*PROMPTS[2])
        wait_until(lambda: run.supervisor.usage.resident_length <= memory)
        programs[0].process.kill()
        wait_until(
            lambda: max(one.memory for one in run.supervisor._control.statistics()) == memory
        )
