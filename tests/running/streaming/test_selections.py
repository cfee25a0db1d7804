"""Selections reach the supervisor whole, and in turn, however large they are."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moepack.common.shape import ExpertKey
from tests.support.models import first_shard
from tests.support.supervised import Program, Supervised, supervised

Graph = tuple[int, int, list[list[int]], int]
EXPERT_COUNT = 16
RING_WORDS = 1 << 18
MODEL = first_shard("qwen3moe")
LAST: Graph = (0, 0, [[15, 14, 13, 12]], 4)
"""A miss: all before it is counted."""


@pytest.fixture
def run() -> Iterator[Supervised]:
    with supervised(MODEL, memory="floor", micro_batch=4) as one:
        yield one


@pytest.fixture
def program(run: Supervised, ggml: Path) -> Iterator[Program]:
    with run.chooser(ggml, MODEL) as one:
        yield one


def test_a_forked_child_changes_nothing_of_what_its_parent_has(
    run: Supervised, program: Program
) -> None:
    chosen: Graph = (0, 0, [[0, 1, 2, 3]], 4)
    assert program.call([chosen]) == [[0]]
    before = run.supervisor.usage
    assert program.call([(0, 1000, [[4, 5, 6, 7]], 4)]) == [[0]]
    assert run.supervisor.usage == before
    assert program.call([LAST]) == [[0]]


@pytest.fixture
def recording() -> Iterator[Supervised]:
    with supervised(MODEL, memory="floor", micro_batch=4, records=True) as one:
        yield one


def rows_of(order: random.Random, count: int, experts: int = EXPERT_COUNT) -> list[list[int]]:
    return [order.sample(range(experts), 4) for _ in range(count)]


def random_graphs(count: int, most: int) -> list[Graph]:
    """Return graphs of two layers, each with a token or a few, some with `most`."""
    order = random.Random(3)
    graphs: list[Graph] = [
        (0, number % 2, rows_of(order, order.choice((1, 1, 1, 3, most)), 9), 4)
        for number in range(count)
    ]
    return [*graphs, LAST]


def test_each_selection_is_counted_once_however_fast_they_come(
    run: Supervised, program: Program
) -> None:
    graphs = random_graphs(2000, 90)
    assert program.call(graphs) == [[0] * len(graphs)]
    usage = run.supervisor.usage
    lookup_count = sum(len({expert for row in graph[2] for expert in row}) for graph in graphs)
    assert usage.hit_count + usage.miss_count == lookup_count


def test_calls_for_few_tokens_are_counted_with_the_experts_that_they_used(
    run: Supervised, program: Program
) -> None:
    graphs = random_graphs(300, 90)
    assert program.call(graphs) == [[0] * len(graphs)]
    (counts,) = run.supervisor._control.statistics()
    few = [(layer, rows) for _, layer, rows, _ in graphs if len(rows) <= 16]
    assert len(few) < len(graphs)
    assert counts.decoding_count == len(few)
    assert counts.decoded_count == sum(len(rows) for _, rows in few)
    lengths = run.supervisor._experts.slot_lengths
    assert counts.decoded_length == sum(
        lengths[ExpertKey(layer, expert)]
        for layer, rows in few
        for expert in {one for row in rows for one in row}
    )
    assert counts.decoding_nanoseconds > 0
    memory, reserve = run.supervisor.budget, run.supervisor._reserve
    assert counts.budget == memory - reserve - min(3 * reserve, memory // 32)


def test_selections_that_nobody_reads_in_time_are_lost_and_counted(
    ggml: Path, recording: Supervised
) -> None:
    """Nothing waits for whoever reads them, and the experts are brought all the same."""
    rows = [[0, 1, 2, 3]] * (RING_WORDS // 16)
    with recording.chooser(ggml, MODEL) as program:
        with recording.supervisor._lock:  # as if it were slow
            assert program.call([(0, 0, rows, 4)] * 9) == [[0] * 9]
        recording.settle()
        assert recording.supervisor.lost_count == 6
        assert program.call([LAST]) == [[0]]
    assert len(recording.supervisor.pop_calls(with_open=True)) == 4
    assert recording.supervisor.usage.miss_count == 8


def test_rows_of_a_view_are_read_without_the_bytes_between_them(
    run: Supervised, program: Program
) -> None:
    assert program.call([(0, 1, [[3, 1], [1, 7], [3, 3]], EXPERT_COUNT)]) == [[0]]
    assert run.supervisor.usage.miss_count == 3
    assert program.call([(0, 1, [[1, 3, 7]], 3)]) == [[0]]
    assert run.supervisor.usage.miss_count == 3


def test_experts_that_a_model_does_not_have_are_nobody_s(run: Supervised, program: Program) -> None:
    assert program.call([(0, 0, [[3, 1, 2, 16]], 4), (0, 7, [[1, 2, 3, 4]], 4)]) == [[0, 0]]
    assert run.supervisor.usage.miss_count == 0


def test_more_contexts_than_rings_get_their_experts(run: Supervised, program: Program) -> None:
    order = random.Random(8)
    graphs = [
        [(number, layer % 2, rows_of(order, 2), 4) for layer in range(8)] for number in range(1, 81)
    ]
    for start in range(0, 80, 20):  # so many at once
        assert program.call(*graphs[start : start + 20]) == [[0] * 8] * 20
    assert not run.failures


def test_calls_of_several_contexts_and_processes_are_recorded_apart(
    ggml: Path, recording: Supervised
) -> None:
    """However they are computed at once, and whenever they are popped."""
    order, count = random.Random(5), 100
    rows = {number: [rows_of(order, number) for _ in range(count)] for number in (1, 2, 3)}
    graphs = [
        [(number, layer, one, 4) for one in rows[number] for layer in (0, 1)]
        for number in (1, 2, 3)
    ]
    calls = []
    with ExitStack() as stack:
        programs = [stack.enter_context(recording.chooser(ggml, MODEL)) for _ in range(2)]
        for program in programs:
            program.begin(*graphs)
        while any(not program.has_answered for program in programs):
            calls += recording.supervisor.pop_calls()
        for program in programs:
            assert program.result() == [[0] * 2 * count] * 3
        assert len(calls) <= 6 * count - 6, "the last of each may go on"
    calls += recording.supervisor.pop_calls(with_open=True)
    recorded = [[call.layers[layer].tolist() for layer in (0, 1)] for call in calls]
    assert all(first == second for first, second in recorded)
    for number in (1, 2, 3):
        ours = [one for one, _ in recorded if len(one) == number]
        assert sorted(ours) == sorted(rows[number] * 2)


def test_selections_of_another_model_are_not_recorded(ggml: Path, recording: Supervised) -> None:
    others = [[[3, 1, 2, 16]], [[1, 1, 2, 3]], [[1, 2, 3, 4, 5]]]
    graphs = [(0, 0, rows, len(rows[0])) for rows in others] + [(0, 7, [[1, 2, 3, 4]], 4)]
    with recording.chooser(ggml, MODEL) as program:
        assert program.call(graphs) == [[0] * 4]
        assert recording.supervisor.pop_calls(with_open=True) == []
        assert program.call([LAST]) == [[0]]
        assert len(recording.supervisor.pop_calls(with_open=True)) == 1


def test_the_same_selection_again_is_another_call(ggml: Path, recording: Supervised) -> None:
    """As of a prompt's tokens one by one: llama.cpp leaves the last layer out."""
    with recording.chooser(ggml, MODEL) as program:
        assert program.call([LAST] * 3) == [[0] * 3]
        assert len(recording.supervisor.pop_calls(with_open=True)) == 3
