"""Several programs, models and contexts at once share a pager: each has its own text."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moepack.pager.mapped_model import slot_room
from moepack.pager.messages import Do, op
from moepack.pager.pager import Pager
from tests.support.llama_program import Answer
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, Paging, Program, paging

Form = Callable[[str, str], Path]
Alone = Callable[[str], list[list[Answer] | str]]
SLOTS = ("--slots", 4, "--micro-batch", 32)
TIGHT = ("--slots", 4, "--micro-batch", 4)


@pytest.fixture(params=["pack", "gguf"])
def run(form: Form, request: pytest.FixtureRequest) -> Iterator[Paging]:
    with paging(form("qwen3moe", request.param), memory="floor", micro_batch=4) as one:
        yield one


def step_of(run: Paging, token_count: int) -> int:
    """Return the bytes of the experts of a step, in whole pages."""
    residents = run.pager._residents
    rooms = {key: slot_room(spans) for key, spans in residents.spans.items()}
    return max(rooms.values()) * min(16, 4 * token_count)


@needs_llama
def test_two_programs_with_four_texts_each_share_a_few_experts(run: Paging) -> None:
    with Program(first_shard("qwen3moe"), *TIGHT) as program:
        expected = program.ask(*PROMPTS[2])
    most = 0
    with ExitStack() as stack:
        programs = [stack.enter_context(run.program(*TIGHT)) for _ in range(2)]
        for program in programs:
            program.begin(*PROMPTS[2])
        while any(not program.has_answered for program in programs):
            most = max(most, run.pager.usage.resident_length)
            time.sleep(0.001)
        assert [program.answers() for program in programs] == [expected, expected]
    assert 0 < most <= run.pager.budget + step_of(run, 4)
    assert run.pager.usage.fault_count == 0
    assert not run.failures


@needs_llama
def test_a_model_twice_in_a_program_answers_right(run: Paging, alone: Alone) -> None:
    expected = alone("qwen3moe")[2]
    with run.program(*SLOTS, "--another", run.pager.model_path) as program:
        assert program.ask_all(*PROMPTS[2]) == [expected, expected]
    assert run.pager.usage.fault_count == 0


@needs_llama
@pytest.mark.parametrize("another", ["mixtral", "deepseek2"])
def test_another_model_in_the_program_answers_right(
    run: Paging, alone: Alone, another: str
) -> None:
    """Mixtral's experts have numbers that ours have as well, layers of deepseek2 have not."""
    with run.program(*SLOTS, "--another", first_shard(another)) as program:
        assert program.ask_all(*PROMPTS[2]) == [alone("qwen3moe")[2], alone(another)[2]]
    assert not run.failures


@needs_llama
def test_our_model_beside_one_with_more_experts_answers_right(form: Form, alone: Alone) -> None:
    with (
        paging(form("mixtral", "pack"), memory="floor", micro_batch=32) as run,
        run.program(*SLOTS, "--another", first_shard("qwen3moe")) as program,
    ):
        assert program.ask_all(*PROMPTS[2]) == [alone("mixtral")[2], alone("qwen3moe")[2]]
        assert not run.failures


@needs_llama
def test_what_one_context_uses_is_not_evicted_for_another(form: Form) -> None:
    """In a pack whatever was evicted and is read none the less would be a page fault."""
    stress(form, seconds=1.0)


@needs_llama
@pytest.mark.slow
def test_what_one_context_uses_is_not_evicted_for_another_for_long(form: Form) -> None:
    stress(form, seconds=60.0)


def stress(form: Form, seconds: float) -> None:
    prompt = [[number % 500 for number in range(60)]]
    with Program(first_shard("qwen3moe"), "--micro-batch", 1) as program:
        expected = program.ask(*prompt)
    with (
        paging(form("qwen3moe", "pack"), memory="floor", micro_batch=1) as run,
        ExitStack() as stack,
    ):
        others = ["--another", run.pager.model_path] * 2
        programs = [stack.enter_context(run.program("--micro-batch", 1, *others)) for _ in range(2)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for program in programs:
                program.begin(*prompt)
            for program in programs:
                assert program.all_answers() == [expected] * 3
        assert run.pager.usage.fault_count == 0
        assert not run.failures


@needs_llama
def test_a_stopped_program_holds_no_other_one_up(run: Paging) -> None:
    with Program(first_shard("qwen3moe"), *TIGHT) as program:
        expected = program.ask(*PROMPTS[2])
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


@needs_llama
def test_pages_that_the_system_takes_from_its_tables_come_back(form: Form) -> None:
    with (
        paging(form("qwen3moe", "pack"), memory=1 << 30, micro_batch=32) as run,
        run.program(*SLOTS) as program,
    ):
        expected = program.ask(*PROMPTS[2])
        resident = run.pager.usage.resident_length
        run.do(drop_pages)
        assert program.ask(*PROMPTS[2]) == expected
        usage = run.pager.usage
        assert 0 < usage.fault_count <= 3 * 2 * 16, "a fault for a part, not for each page"
        assert usage.resident_length == resident


def drop_pages(pager: Pager) -> None:
    """Have all pages of experts be page faults, which stay where they are."""
    (client,) = pager._mapper.clients
    for key in client.resident:
        for span in pager._residents.spans[key]:
            start, end = span.whole_pages
            place = {"file": span.file, "offset": start, "length": end - start}
            client.do([op(Do.RESTORE, **place)])
    client.finish()


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_a_program_has_what_is_pinned_at_once_and_announces_nothing(
    form: Form, alone: Alone, kind: str
) -> None:
    with (
        paging(form("qwen3moe", kind), memory=1 << 30, pinned=1 << 30, micro_batch=32) as run,
        run.program(*SLOTS) as program,
    ):
        assert program.ask(*PROMPTS[2]) == alone("qwen3moe")[2]
        usage = run.pager.usage
    assert usage.holds_all
    assert (usage.hit_count, usage.miss_count, usage.fault_count) == (0, 0, 0)
