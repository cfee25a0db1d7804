"""Experts that were used most in earlier runs are read ahead, and change no answer."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from moepack.running.pager.budget import token_length
from moepack.running.pager.pager import Pager
from tests.support.children import wait_until
from tests.support.models import flip
from tests.support.needs import needs_llama
from tests.support.pagers import SLOTS, Alone, Form, Paging, answers, paging

pytestmark = pytest.mark.long

MOST_USED = [ExpertKey(number % 2, number) for number in range(15, -1, -1)]
"""Eight of each of two layers."""
MEMORY = 1_400_000


@contextmanager
def warm(model: Path, *, is_pinning: bool = False, **options: Any) -> Iterator[Paging]:
    """Yield a pager that has read the most used experts."""
    options = {"memory": MEMORY, "micro_batch": 1} | options
    most_used = options.pop("keys", MOST_USED)
    with paging(model, most_used=most_used, pins_most_used=is_pinning, **options) as run:
        wait_until(lambda: not run.pager.is_warming)
        run.settle()
        yield run


def resident(run: Paging) -> set[ExpertKey]:
    return {key for key in run.pager._residents.spans if key in run.pager._residents}


def test_what_was_used_most_hits_at_once_and_is_nobodys_miss(form: Form, ggml: Path) -> None:
    model = form("qwen3moe", "gguf")
    with warm(model) as run:
        before = run.pager.usage
        assert resident(run) == set(MOST_USED)
        assert (before.hit_count, before.miss_count) == (0, 0)
        assert before.read_seconds < 0.001, "nobody waited"
        assert before.read_length > 0
        with run.chooser(ggml, model) as program:
            assert program.call([(0, 0, [[15 - 1, 12, 10, 8]], 4)]) == [[0]]
            assert program.call([(0, 1, [[15, 13, 11, 0]], 4)]) == [[0]]
        usage = run.pager.usage
    assert (usage.hit_count, usage.miss_count) == (7, 1)


def test_no_more_is_read_than_there_is_memory_for_and_the_first_first(form: Form) -> None:
    for memory in ("floor", 500_000, 700_000):
        with warm(form("qwen3moe", "gguf"), memory=memory) as run:
            there = resident(run)
            assert there == set(MOST_USED[: len(there)])
            length = sum(run.rooms[key] for key in there)
            following = run.rooms[MOST_USED[len(there)]]
            assert length <= run.pager._residents.cache.budget < length + following


def test_of_memory_that_is_merely_free_half_is_left_to_the_program(form: Form) -> None:
    every = [ExpertKey(layer, expert) for layer in range(2) for expert in range(16)]
    with warm(form("qwen3moe", "gguf"), memory=None, keys=every) as run:
        length = sum(run.rooms[key] for key in resident(run))
        assert 0 < length <= run.pager._residents.cache.budget // 2


def test_what_was_used_least_is_evicted_first(form: Form, ggml: Path) -> None:
    model = form("qwen3moe", "gguf")
    with warm(model, memory=900_000) as run:
        there = [key for key in MOST_USED if key in resident(run)]
        with run.chooser(ggml, model) as program:
            assert program.call([(0, 0, [[1, 3]], 2)]) == [[0]]
            run.settle()
        kept = [key for key in there if key in resident(run)]
        assert 0 < len(kept) < len(there)
        assert kept == there[: len(kept)]


def test_it_ends_when_a_router_chooses(form: Form, ggml: Path) -> None:
    """A piece is larger than this model: it is made smaller than an expert here."""
    model = form("qwen3moe", "gguf")
    with (
        pytest.MonkeyPatch.context() as patch,
        paging(model, memory=MEMORY, micro_batch=1, most_used=MOST_USED) as run,
    ):
        patch.setattr("moepack.running.pager.warm_up._PIECE_LENGTH", 1)
        with run.chooser(ggml, model) as program:

            def choose(pager: Pager) -> None:
                pager._warm_up._waiting.append(MOST_USED[0])
                assert pager._warm_up.is_due
                program.begin([(0, 0, [[0, 1, 2, 3]], 4)])
                while not program.has_answered:
                    for client in pager._mapper.clients:
                        pager._serve_one(client)
                assert not pager._warm_up.is_due

            run.do(choose)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_what_is_worth_it_stays(form: Form, ggml: Path, policy: str) -> None:
    model = form("qwen3moe", "gguf")
    with warm(model, is_pinning=True, policy=policy, memory=900_000) as run:
        with run.chooser(ggml, model) as program:
            for layer in (0, 1):
                graphs = [(0, layer, [[one, one + 1]], 2) for one in range(0, 16, 2)]
                assert program.call(graphs * 3) == [[0] * 24]
        assert set(MOST_USED[:3]) < resident(run), "the first are pinned"


def test_an_explicit_pin_leaves_nothing_to_what_was_learned(form: Form) -> None:
    for pinned in (0, 100_000):
        with warm(form("qwen3moe", "gguf"), is_pinning=True, pinned=pinned) as run:
            assert not run.pager._residents.cache._favoured
    with warm(form("qwen3moe", "gguf"), is_pinning=True) as run:
        favoured = run.pager._residents.cache._favoured
        assert 0 < len(favoured) < len(MOST_USED)
        assert list(favoured)[:6] == MOST_USED[:6], "the first of them"


def test_pinned_experts_leave_room_for_those_of_a_token(form: Form) -> None:
    with warm(form("qwen3moe", "gguf"), is_pinning=True, memory="floor") as run:
        residents = run.pager._residents
        with open_model([form("qwen3moe", "gguf")]) as pack:
            needed = token_length(pack.shape, run.rooms)
        pinned = sum(run.rooms[key] for key in residents.cache._favoured)
        assert pinned + needed <= residents.cache.budget or not pinned


@needs_llama
@pytest.mark.parametrize("kind", ["gguf", "pack"])
@pytest.mark.parametrize("is_pinning", [False, True])
def test_answers_are_those_of_the_program_alone(
    form: Form, alone: Alone, kind: str, is_pinning: bool
) -> None:
    pins: Any = {"most_used": MOST_USED, "pins_most_used": is_pinning}
    with (
        paging(form("qwen3moe", kind), memory="floor", micro_batch=32, **pins) as run,
        run.program(*SLOTS) as program,
    ):
        assert answers(program) == alone("qwen3moe")
    assert not run.failures


def test_an_expert_that_cannot_be_read_ends_it_and_no_more(pack_copy: Path, tmp_path: Path) -> None:
    with open_model(shutil.copytree(pack_copy, tmp_path / "damaged")) as pack:
        place = pack.locate(*MOST_USED[0])
        flip(place.path, place.offset + 1000)
    with warm(tmp_path / "damaged") as run:
        assert MOST_USED[0] not in resident(run)
        assert not run.failures
        assert run.pager.usage.resident_length == 0 or resident(run)
