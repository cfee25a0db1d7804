"""An unwatched program answers right all the same: the experts that it reads are brought."""

import pytest

from tests.support.models import REAL_MODELS
from tests.support.pagers import SLOTS, Alone, Form, answers, paging


@pytest.mark.parametrize(
    ("model", "memory"), [*((model, "floor") for model in REAL_MODELS), ("qwen3moe", 1 << 30)]
)
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
def test_an_unwatched_program_reads_experts_of_a_gguf_in_its_file(
    alone: Alone, form: Form, memory: int | str
) -> None:
    expected = alone("qwen3moe")
    with paging(form("qwen3moe", "gguf"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS) as program:
            run.watch(False)
            before = run.pager.usage  # the server computes a token when it starts
            assert answers(program) == expected
        usage = run.pager.usage
    assert (usage.miss_count, usage.read_length) == (before.miss_count, before.read_length)
    assert usage.fault_count == 0
