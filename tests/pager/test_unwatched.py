"""A program whose routers nobody watches answers right all the same: what it reads is brought."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.llama_program import Answer
from tests.support.models import REAL_MODELS
from tests.support.pagers import answers, paging

Alone = Callable[[str], list[list[Answer] | str]]
Form = Callable[[str, str], Path]
SLOTS = ("--slots", 4, "--micro-batch", 32)


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_an_unwatched_program_reads_experts_of_a_pack_by_page_faults(
    alone: Alone, form: Form, model: str, memory: int | str
) -> None:
    expected = alone(model)
    with paging(form(model, "pack"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS) as program:
            run.watch(False)
            assert answers(program) == expected
        usage = run.pager.usage
    assert usage.fault_count > 0
    assert not run.failures


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_an_unwatched_program_reads_experts_of_a_gguf_in_its_file(
    alone: Alone, form: Form, model: str, memory: int | str
) -> None:
    expected = alone(model)
    with paging(form(model, "gguf"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS) as program:
            run.watch(False)
            before = run.pager.usage  # the server computes a token when it starts
            assert answers(program) == expected
        usage = run.pager.usage
    assert (usage.miss_count, usage.read_length) == (before.miss_count, before.read_length)
    assert usage.fault_count == 0


@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_a_program_that_is_watched_now_and_then_answers_right(
    alone: Alone, form: Form, kind: str
) -> None:
    expected = alone("qwen3moe")[:2]  # texts together take other slots the next time
    with (
        paging(form("qwen3moe", kind), memory="floor", micro_batch=1) as run,
        run.program(*SLOTS) as program,
    ):
        for is_watched in (False, True, False, True):
            run.watch(is_watched)
            assert answers(program)[:2] == expected
