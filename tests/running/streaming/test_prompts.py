"""Steps of many tokens: the next layer is prefetched, and used."""

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MachineError
from moepack.pack.opening.open_model import open_model
from moepack.storage import page_cache
from tests.support.children import wait_until
from tests.support.gguf_builder import moe
from tests.support.models import first_shard
from tests.support.needs import needs_library
from tests.support.supervised import Answers, Form, Program, Supervised, slot_lengths, supervised

LAYERS, EXPERTS = 6, 16
MANY = 64
"""Tokens of a step that likely use all experts of the next layer."""
FEW = 16
"""The most tokens of a step for which the next layer is not read ahead."""
LENGTH = 3 * 2176
"""The bytes of an expert."""
ALL = list(range(EXPERTS))
Call = Callable[..., Any]
Preloaded = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of six layers that have sixteen experts each."""
    return moe(tuple(range(LAYERS)), EXPERTS).write(tmp_path_factory.mktemp("layers") / "m.gguf")


def room_of(model: Path) -> int:
    """Return the bytes that an expert takes in memory."""
    return max(slot_lengths(model).values())


@contextmanager
def running(
    model: Path,
    ggml: Path,
    layers: float,
    *,
    before: Path | None = None,
    faults: Path | None = None,
    **options: Any,
) -> Iterator[tuple[Supervised, Call]]:
    """Run a program that routes, with memory for so many layers; yield a function that calls it."""
    memory = int((layers * EXPERTS + 2) * room_of(model))
    names = {} if faults is None else {"FAULTY_READS": str(faults)}
    with (
        supervised(
            model,
            prefetch=False,
            memory=memory,
            micro_batch=MANY,
            **{"backend": "buffered"} | options,
        ) as run,
        run.chooser(ggml, model, before, **names) as program,
    ):
        yield run, lambda *graphs: program.call([step(*graph) for graph in graphs])


def step(layer: int, experts: list[int], token_count: int = MANY) -> tuple[Any, ...]:
    """Return a graph in which each of `experts` is chosen, by two for each token."""
    order = random.Random(layer)
    rows = [experts[n : n + 2] for n in range(0, len(experts) - 1, 2)][:token_count]
    rows += [order.sample(experts, 2) for _ in range(token_count - len(rows))]
    return 0, layer, rows, 2


def read_count(run: Supervised) -> float:
    """Return how many experts were read."""
    return run.supervisor.usage.read_length / LENGTH


def has_read(run: Supervised, count: int) -> Callable[[], bool]:
    return lambda: read_count(run) == count


def test_the_next_layer_is_read_while_one_computes(model: Path, ggml: Path) -> None:
    with running(model, ggml, 2) as (run, call):
        for layer in range(LAYERS):
            assert call((layer, ALL)) == [[0]]
            wait_until(has_read(run, EXPERTS * min(layer + 2, LAYERS)))
        assert run.supervisor.usage.miss_count == EXPERTS * LAYERS
        assert run.supervisor.usage.resident_length <= run.supervisor.usage.budget


def test_a_few_tokens_have_nothing_read_ahead(model: Path, ggml: Path) -> None:
    with running(model, ggml, 3) as (run, call):
        assert call((0, ALL, FEW), (1, [0, 1], 1)) == [[0, 0]]
        run.settle()
        assert read_count(run) == EXPERTS + 2


def test_pages_that_experts_share_with_others_are_read_along(model: Path, ggml: Path) -> None:
    """No part of the model has a page of its own: a program would read them one by one."""
    with open_model([model]) as pack:
        try:
            pack.reader(backend="direct").close()
        except MachineError as error:
            pytest.skip(str(error))
    with running(model, ggml, 3, backend="direct") as (_, call):
        page_cache.drop([model])
        before = page_cache.cached_share([model])
        if before is None or before > 0.5:
            pytest.skip("the system does not say what is cached, or keeps it")
        assert call((1, ALL, 8)) == [[0]]
        expected = before + 0.9 * 3 * EXPERTS * 2176 / model.stat().st_size
        wait_until(lambda: (page_cache.cached_share([model]) or 0) >= expected)


@pytest.fixture
def fault(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that has reads of an expert of layer 1 go wrong, by `faulty_reads.c`."""

    def write(mode: str) -> Path:
        with open_model([model]) as pack:
            part = pack.locate(1, 7, "ffn_up_exps.weight")
        (tmp_path / "f").write_text(f"{mode} {part.offset} {part.offset + part.length}")
        return tmp_path / "f"

    return write


def test_what_cannot_be_read_ahead_is_read_once_more(
    model: Path, ggml: Path, preloaded: Preloaded, fault: Callable[..., Path]
) -> None:
    faults = fault(f"errno {errno.EIO}")
    with running(model, ggml, 2, before=preloaded("faulty_reads"), faults=faults) as (run, call):
        assert call((0, ALL)) == [[0]]
        wait_until(lambda: run.supervisor.usage.expert_length == (2 * EXPERTS - 1) * room_of(model))
        run.settle()
        assert not run.failures
        assert call((1, [6, 7], 1)) == [[-1]], "that step alone"
        run.settle()
        assert len(run.failures) == 1
        assert call((1, ALL[:6]), (2, ALL)) == [[0, 0]]
        faults.unlink()
        assert call((1, ALL)) == [[0]]
        run.settle()
        assert len(run.failures) == 1


def test_what_is_demanded_while_it_comes_unwanted_is_waited_for(
    model: Path, ggml: Path, preloaded: Preloaded, fault: Callable[..., Path]
) -> None:
    """A single token of another layer comes between: experts in flight are not wanted any more."""
    faults = fault("slow 300")
    with running(model, ggml, 2, before=preloaded("faulty_reads"), faults=faults) as (run, call):
        assert call((0, ALL), (5, [1, 2], 1), (1, [6, 7], 1)) == [[0, 0, 0]]
        assert run.supervisor.usage.read_seconds > 0.15
        assert read_count(run) < 2 * EXPERTS + 4, "the slow one was not read twice"


def test_a_program_ends_while_experts_come(
    model: Path, ggml: Path, preloaded: Preloaded, fault: Callable[..., Path]
) -> None:
    faults = fault("slow 200")
    with running(model, ggml, 2, before=preloaded("faulty_reads"), faults=faults) as (run, call):
        assert call((0, ALL)) == [[0]]
    assert not run.failures


def test_nothing_is_read_ahead_while_nobody_waits(model: Path, ggml: Path) -> None:
    """As a server says whose client has closed; it computes its micro-batch to the end."""
    with (
        supervised(model, memory=1 << 20, micro_batch=MANY, backend="buffered") as run,
        run.chooser(ggml, model) as program,
    ):
        assert program.call([(-1, 0, [], 0), step(0, ALL), step(1, [0, 1], 1)]) == [[0, 0]]
        assert read_count(run) == EXPERTS + 2
        assert program.call([(-1, 1, [], 0), step(0, ALL)]) == [[0]]
        wait_until(has_read(run, 2 * EXPERTS))


@needs_library
@pytest.mark.parametrize(
    ("name", "kind", "memory"),
    [
        ("qwen3moe", "gguf", "floor"),
        ("qwen3moe", "pack", 1_150_000),
        ("mixtral", "gguf", 1_900_000),
        ("mixtral", "pack", "floor"),
    ],
)
def test_long_prompts_are_answered_as_by_the_program_alone(
    form: Form, name: str, kind: str, memory: int | str
) -> None:
    texts = [[(31 * n * n + 5 * text) % 500 for n in range(300)] for text in range(2)]
    slots = ("--slots", 2, "--micro-batch", 128)
    with Program(first_shard(name), *slots) as program:
        expected: list[Answers] = [program.ask(text) for text in texts]
        expected.append(program.ask(*texts))
    with supervised(form(name, kind), memory=memory, micro_batch=128) as run:
        with run.program(*slots) as program:
            answers = [program.ask(text) for text in texts]
            answers.append(program.ask(*texts))
        assert answers == expected
        assert run.supervisor.usage.fault_count == 0


def test_what_is_pinned_leaves_prompts_the_rest(model: Path, ggml: Path) -> None:
    """Nothing is read beyond the budget, and experts in use are not evicted for it."""
    with running(model, ggml, 3, pinned=20 * 6528) as (run, call):
        budget = run.supervisor.usage.budget
        for _ in range(3):
            for layer in range(LAYERS):
                assert call((layer, ALL)) == [[0]]
                run.settle()
                assert run.supervisor.usage.resident_length <= budget
