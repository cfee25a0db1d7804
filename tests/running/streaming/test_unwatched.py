"""An unwatched program answers right all the same: the experts that it reads are brought."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.supervised import SLOTS, Alone, Form, answers, supervised

Preloaded = Callable[[str], Path]


@pytest.mark.parametrize(
    ("model", "memory"), [("deepseek2", "floor"), ("mixtral", "floor"), ("qwen3moe", 1 << 30)]
)
def test_an_unwatched_program_reads_experts_of_a_pack_by_faults(
    alone: Alone, form: Form, preloaded: Preloaded, model: str, memory: int | str
) -> None:
    with supervised(form(model, "pack"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS, before=preloaded("unwatched")) as program:
            assert answers(program) == alone(model)
        usage = run.supervisor.usage
    assert usage.fault_count > 0
    assert usage.resident_length <= usage.budget
    assert not run.failures


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
def test_an_unwatched_program_reads_experts_of_a_gguf_in_its_file(
    alone: Alone, form: Form, preloaded: Preloaded, memory: int | str
) -> None:
    with supervised(form("qwen3moe", "gguf"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS, before=preloaded("unwatched")) as program:
            assert answers(program) == alone("qwen3moe")
        usage = run.supervisor.usage
    assert (usage.miss_count, usage.read_length, usage.fault_count) == (0, 0, 0)
