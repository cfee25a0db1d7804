"""What routers chose reaches the pager whole, and in turn, however much it is."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moepack.caching import cache as caching
from moepack.caching.cache import Tally
from moepack.keys import ExpertKey
from moepack.packing.opening import open_model
from moepack.pager.mapped_model import slot_room
from moepack.pager.messages import RING_WORDS
from tests.support.pagers import Paging, Program, paging

Form = Callable[[str, str], Path]
Graph = tuple[int, int, list[list[int]], int]
EXPERT_COUNT = 16


@pytest.fixture
def run(form: Form) -> Iterator[Paging]:
    with paging(form("qwen3moe", "gguf"), memory="floor", micro_batch=4) as one:
        yield one


def program_of(run: Paging, ggml: Path, form: Form) -> Program:
    """Start a program that chooses, with a shard mapped that has experts."""
    with open_model([form("qwen3moe", "gguf")]) as pack:
        shard = pack.locate(0, 0, "ffn_gate_exps.weight").path
    arguments = (ggml, os.path.getsize(shard))
    return Program(shard, *arguments, module="chooser", **run.environment)


def rows_of(order: random.Random, count: int, experts: int = EXPERT_COUNT) -> list[list[int]]:
    return [order.sample(range(experts), 4) for _ in range(count)]


def replay(run: Paging, graphs: list[Graph], policy: str = "lru") -> Tally:
    """Count what a cache of the pager's size hits and misses."""
    residents = run.pager._residents
    rooms = {key: slot_room(spans) for key, spans in residents.spans.items()}
    cache = caching.make(policy, residents.budget, rooms)
    tally = Tally()
    for _, layer, rows, _ in graphs:
        cache.step([ExpertKey(layer, expert) for row in rows for expert in row], tally)
    return tally


def chosen_graphs(count: int, most: int) -> list[Graph]:
    """Return graphs of two layers, each with a token or a few, some with `most`."""
    order = random.Random(3)
    return [
        (0, number % 2, rows_of(order, order.choice((1, 1, 1, 3, most)), 9), 4)
        for number in range(count)
    ]


def test_hits_and_misses_are_those_of_a_simulated_cache(
    run: Paging, ggml: Path, form: Form
) -> None:
    graphs = chosen_graphs(900, 60)
    graphs.append((0, 0, [[15, 14, 13, 12]], 4))  # a miss: all before it is counted
    with program_of(run, ggml, form) as program:
        for graph in graphs:
            assert program.call([graph]) == [[0]]
            run.do(lambda _: None)  # when it has evicted what it may
    expected = replay(run, graphs)
    usage = run.pager.usage
    assert (usage.hit_count, usage.miss_count) == (expected.hit_count, expected.miss_count)
    assert min(usage.hit_count, usage.miss_count) > 100


def test_each_choice_is_counted_once_however_fast_they_come(
    run: Paging, ggml: Path, form: Form
) -> None:
    graphs = chosen_graphs(6000, 90)
    graphs.append((0, 0, [[15, 14, 13, 12]], 4))
    with program_of(run, ggml, form) as program:
        assert program.call(graphs) == [[0] * len(graphs)]
    usage = run.pager.usage
    lookup_count = sum(len({expert for row in graph[2] for expert in row}) for graph in graphs)
    assert usage.hit_count + usage.miss_count == lookup_count


def test_choices_that_hit_are_taken_before_the_ring_is_full(
    run: Paging, ggml: Path, form: Form
) -> None:
    row = [0, 1, 2, 3]
    graphs: list[Graph] = [(0, 0, [row] * 1000, 4)] * 200
    assert sum(4 * len(graph[2]) for graph in graphs) > 3 * RING_WORDS
    with program_of(run, ggml, form) as program:
        assert program.call(graphs) == [[0] * len(graphs)]
        assert run.pager.usage.miss_count == 4
        assert program.call([(0, 0, [[15, 14, 13, 12]], 4)]) == [[0]]
    assert run.pager.usage.hit_count == 4 * 199
    assert run.pager.usage.miss_count == 8


def test_a_choice_that_is_larger_than_the_ring_fails_and_the_next_does_not(
    run: Paging, ggml: Path, form: Form
) -> None:
    row = [0, 1, 2, 3]
    graphs: list[Graph] = [(0, 0, [row], 4), (0, 0, [row] * (RING_WORDS // 8), 4)]
    graphs += [(0, 0, [row] * (RING_WORDS // 8 - 1), 4), (0, 0, [[4, 5, 6, 7]], 4)]
    with program_of(run, ggml, form) as program:
        assert program.call(graphs) == [[0, -1, 0, 0]]
        assert program.complaint.count("too many tokens at once") == 1
    assert run.pager.usage.miss_count == 8


def test_rows_of_a_view_are_read_without_what_lies_between_them(
    run: Paging, ggml: Path, form: Form
) -> None:
    with program_of(run, ggml, form) as program:
        assert program.call([(0, 1, [[3, 1], [1, 7], [3, 3]], EXPERT_COUNT)]) == [[0]]
    assert run.pager.usage.miss_count == 3
    assert all(ExpertKey(1, expert) in run.pager._residents for expert in (1, 3, 7))


def test_experts_that_a_model_does_not_have_are_nobody_s(
    run: Paging, ggml: Path, form: Form
) -> None:
    with program_of(run, ggml, form) as program:
        assert program.call([(0, 0, [[3, 1, 2, 16]], 4), (0, 7, [[1, 2, 3, 4]], 4)]) == [[0, 0]]
    assert run.pager.usage.miss_count == 0


def test_more_contexts_than_rings_get_what_they_choose(run: Paging, ggml: Path, form: Form) -> None:
    order = random.Random(8)
    graphs = [
        [(number, layer % 2, rows_of(order, 2), 4) for layer in range(40)]
        for number in range(1, 81)
    ]
    with program_of(run, ggml, form) as program:
        for start in range(0, 80, 20):  # so many at once
            assert program.call(*graphs[start : start + 20]) == [[0] * 40] * 20
    assert not run.failures


def test_calls_of_several_contexts_and_processes_are_recorded_apart(ggml: Path, form: Form) -> None:
    """However they are computed at once, and whenever they are taken."""
    order = random.Random(5)
    rows = {number: [rows_of(order, number) for _ in range(300)] for number in (1, 2, 3)}
    graphs = [
        [(number, layer, one, 4) for one in rows[number] for layer in (0, 1)]
        for number in (1, 2, 3)
    ]
    calls = []
    with paging(form("qwen3moe", "gguf"), memory="floor", micro_batch=4, records=True) as run:
        with ExitStack() as stack:
            programs = [stack.enter_context(program_of(run, ggml, form)) for _ in range(2)]
            for program in programs:
                program.begin(*graphs)
            while any(not program.has_answered for program in programs):
                calls += run.pager.take_calls()
            for program in programs:
                assert program.result() == [[0] * 600] * 3
            assert len(calls) <= 1800 - 6, "the last of each may go on"
        calls += run.pager.take_calls(with_open=True)
    recorded = [[call.layers[layer].tolist() for layer in (0, 1)] for call in calls]
    assert all(first == second for first, second in recorded)
    for number in (1, 2, 3):
        ours = [one for one, _ in recorded if len(one) == number]
        assert sorted(ours) == sorted(rows[number] * 2)


def test_what_another_model_chose_is_not_recorded(ggml: Path, form: Form) -> None:
    others = [[[3, 1, 2, 16]], [[1, 1, 2, 3]], [[1, 2, 3, 4, 5]]]
    graphs = [(0, 0, rows, len(rows[0])) for rows in others] + [(0, 7, [[1, 2, 3, 4]], 4)]
    with (
        paging(form("qwen3moe", "gguf"), memory="floor", records=True) as run,
        program_of(run, ggml, form) as program,
    ):
        assert program.call(graphs) == [[0] * 4]
        assert run.pager.take_calls(with_open=True) == []
        assert program.call([(0, 0, [[1, 2, 3, 4]], 4)]) == [[0]]
        assert len(run.pager.take_calls(with_open=True)) == 1


def test_the_same_choice_again_is_another_call(ggml: Path, form: Form) -> None:
    """As of a prompt's tokens one by one: llama.cpp leaves the last layer out."""
    with (
        paging(form("qwen3moe", "gguf"), memory="floor", records=True) as run,
        program_of(run, ggml, form) as program,
    ):
        assert program.call([(0, 0, [[1, 2, 3, 4]], 4)] * 3) == [[0] * 3]
        assert len(run.pager.take_calls(with_open=True)) == 3
