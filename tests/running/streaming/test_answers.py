"""A program answers the same with its experts brought as alone: each token, to the last digit.

Also one that is not watched: the experts that it reads are brought.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.running.streaming.control import ExpertUsage
from tests.support.models import I_QUANTS, REAL_MODELS, keys_of
from tests.support.reads import unmappable
from tests.support.supervised import SLOTS, Alone, Answers, Form, answers, supervised


def usage_after(model: Path, expected: list[Answers], **options: Any) -> ExpertUsage:
    with supervised(model, **options) as run:
        with run.program(*SLOTS) as program:
            assert answers(program) == expected
        assert not run.failures
        return run.supervisor.usage


def test_a_pack_may_lie_on_a_file_system_that_maps_no_files(
    alone: Alone, form: Form, tmp_path: Path
) -> None:
    with (
        unmappable(form("qwen3moe", "pack"), tmp_path / "pack") as path,
        pytest.warns(RuntimeWarning, match="maps no files: dense tensors of .* KiB"),
    ):
        usage = usage_after(path, alone("qwen3moe"), memory="floor", micro_batch=32)
    assert usage.miss_count > 0
    assert usage.fault_count == 0


@pytest.mark.parametrize(
    ("model", "kind", "memory"),
    [
        *((model, kind, "floor") for model in REAL_MODELS for kind in ("gguf", "pack")),
        ("gpt-oss", "gguf", 1 << 30),
        ("deepseek2", "pack", 1 << 30),
        ("mixtral", "index", 1 << 30),
    ],
)
def test_answers_are_those_of_the_program_alone(
    alone: Alone, form: Form, model: str, kind: str, memory: int | str
) -> None:
    usage = usage_after(form(model, kind), alone(model), memory=memory, micro_batch=32)
    with moepack.open(form(model, "index")) as pack:
        expert_count = len(keys_of(pack))
    if memory == "floor":
        assert usage.miss_count > expert_count  # some were evicted, and brought once more
        assert usage.resident_length <= usage.budget
    else:
        assert 0 < usage.miss_count <= expert_count
    if kind != "pack" or model not in I_QUANTS:  # else pages that two short experts share
        assert usage.fault_count == 0  # the program announced all that it read


@pytest.mark.parametrize("policy", ["lrfu", "lru"])
def test_policies_and_pins_change_no_answer(alone: Alone, form: Form, policy: str) -> None:
    options = {"memory": 1_200_000, "policy": policy, "pinned": 200_000, "micro_batch": 2}
    usage = usage_after(form("mixtral", "pack"), alone("mixtral"), **options)
    assert usage.miss_count > 16


@pytest.mark.parametrize(
    ("model", "memory"), [("deepseek2", "floor"), ("mixtral", "floor"), ("qwen3moe", 1 << 30)]
)
def test_an_unwatched_program_reads_experts_of_a_pack_by_faults(
    alone: Alone, form: Form, preloaded: Callable[[str], Path], model: str, memory: int | str
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
    alone: Alone, form: Form, preloaded: Callable[[str], Path], memory: int | str
) -> None:
    with supervised(form("qwen3moe", "gguf"), memory=memory, micro_batch=1) as run:
        with run.program(*SLOTS, before=preloaded("unwatched")) as program:
            assert answers(program) == alone("qwen3moe")
        usage = run.supervisor.usage
    assert (usage.miss_count, usage.read_length, usage.fault_count) == (0, 0, 0)
