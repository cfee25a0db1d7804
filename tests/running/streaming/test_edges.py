"""Budgets that differ by one expert, and a library that compares what is mapped with the files."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from tests.support.models import first_shard
from tests.support.needs import require_llama
from tests.support.supervised import Answers, Form, Program, answers, slot_lengths, supervised

MODEL = "qwen3moe"
LAYER = 16
"""How many experts a layer has, and so a step of many tokens."""
CHOICES = [
    (micro_batch, policy, check)
    for check in ("never", "first", "always")
    for policy in ("lrfu", "lru")
    for micro_batch in (32, 512)
]


@pytest.fixture(scope="session")
def alone() -> Callable[[int], list[Answers]]:
    """Return the answers of a program without us, by its micro-batch."""
    require_llama()

    @cache
    def answer(micro_batch: int) -> list[Answers]:
        with Program(first_shard(MODEL), "--slots", 4, "--micro-batch", micro_batch) as program:
            return answers(program)

    return answer


def budgets() -> Iterator[Any]:
    """Yield what a budget has beyond the least, options, and a form: half of them are `slow`."""
    # A step of a prompt has one expert more than there are slots, as many, one less.
    for number, more in enumerate([*range(7), *range(LAYER - 2, LAYER + 3)]):
        for kind in ("pack", "gguf"):
            marks = () if (kind == "pack") == (number % 2 == 0) else pytest.mark.slow
            yield pytest.param(more, CHOICES[number], kind, id=f"+{more}-{kind}", marks=marks)


@pytest.mark.parametrize(("more", "choice", "kind"), [*budgets()])
def test_answers_stay_from_expert_to_expert(
    form: Form,
    alone: Callable[[int], list[Answers]],
    comparing: Path,
    more: int,
    choice: tuple[int, str, str],
    kind: str,
) -> None:
    micro_batch, policy, check = choice
    model = form(MODEL, kind)
    longest = max(slot_lengths(model).values())
    with supervised(model, memory="floor", micro_batch=1) as run:
        memory = run.supervisor.floor + more * longest
    with supervised(model, memory=memory, policy=policy, check=check, micro_batch=1) as run:
        names = run.environment | {"LD_PRELOAD": str(comparing)}
        options = ("--slots", 4, "--micro-batch", micro_batch)
        with Program(run.supervisor.model_path, *options, **names) as program:
            assert answers(program) == alone(micro_batch), program.complaint
        assert run.supervisor.usage.fault_count == 0
        assert not run.failures


def test_the_comparing_library_ends_a_program_whose_experts_are_others(
    form: Form, comparing: Path, tmp_path: Path
) -> None:
    require_llama()
    shutil.copytree(form(MODEL, "pack"), tmp_path, dirs_exist_ok=True)
    with open_model([tmp_path]) as pack:
        part = pack.locate(*ExpertKey(0, 3), "ffn_up_exps.weight")
    with supervised(tmp_path, memory=1 << 30, check="never", records=True) as run:
        names = run.environment | {"LD_PRELOAD": str(comparing)}
        with Program(run.supervisor.model_path, "--slots", 4, **names) as program:
            assert isinstance(
                program.ask([*range(90)]), list
            )  # nearly all experts are in memory now
            with open(part.path, "r+b") as file:
                os.pwrite(file.fileno(), bytes(16), part.offset)
            program.begin([*range(90)])
            assert program.result() is None
            program.process.wait()
            assert "layer 0 expert 3 part" in program.complaint
