"""Micro-batches: the tokens of a prompt computed at once, unless options set them."""

from typing import Any

import pytest

from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack
from moepack.running.pager.pager import Pager, PagerOptions
from moepack.running.programs import server_memory
from moepack.running.programs.server_memory import (
    MICRO_BATCHES,
    choose_micro_batch,
    floor_length,
    server_options,
)


def chosen(pack: Pack, context: int | None) -> int:
    return choose_micro_batch(pack, context=context, memory=1 << 40, pinned=0)


@pytest.mark.parametrize(
    ("context", "count"),
    [(None, 2048), (8192, 2048), (2000, 2048), (1024, 1024), (600, 1024), (1, 1)],
)
def test_prompts_are_computed_in_pieces_as_large_as_the_context_needs(
    context: int | None, count: int, pack: Pack
) -> None:
    assert chosen(pack, context) == count


@pytest.mark.parametrize("pinned", [0, 100_000])
def test_the_experts_of_one_fit_into_memory(pinned: int, pack: Pack) -> None:
    """The pager accepts the micro-batch, and twice as much would need too much memory."""
    counts = set()
    for memory in range(floor_length(pack, 1, pinned), 2 << 20, 1 << 16):
        count = choose_micro_batch(pack, context=None, memory=memory, pinned=pinned)
        with Pager(pack, PagerOptions(memory, pinned=pinned, micro_batch=count), print):
            pass
        counts.add(count)
        assert count == 2048 or floor_length(pack, 2 * count, pinned) > memory
    assert {1, 2048} <= counts


def test_experts_that_an_option_adds_leave_memory_for_fewer_tokens(pack: Pack) -> None:
    more = ["--override-kv", "qwen3moe.expert_used_count=int:8"]
    limits: Any = {"context": None, "memory": floor_length(pack, 4, 0), "pinned": 0}
    assert choose_micro_batch(pack, **limits) == 2048
    assert choose_micro_batch(pack, **limits, options=more) == 1


def test_the_floor_is_the_least_of_all(pack: Pack) -> None:
    """With no micro-batch it works with less."""
    count = choose_micro_batch(pack, context=None, memory="floor", pinned=0)
    with Pager(pack, PagerOptions("floor", micro_batch=count), print) as pager:
        floor = pager.budget
    for fewer in MICRO_BATCHES:
        with pytest.raises(RequestError, match="too little memory for the experts of one step"):
            Pager(pack, PagerOptions(floor - 1, micro_batch=fewer), print)


def test_computing_leaves_memory_to_experts(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "available_memory", lambda: 300 << 20)
    assert chosen(pack, context=8192) == 1024
    monkeypatch.setattr(server_memory, "available_memory", lambda: 1 << 20)
    assert chosen(pack, context=8192) == 512


def test_what_is_said_is_left_alone(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ["--cache-ram", "64"]
    assert server_options(pack, ["-c", "100"], None, 0)[0] == ["-c", "100", *cache, "-ub", "128"]
    for options in (["-ub", "32"], ["--ubatch-size=7"], ["-b", "9"]):
        assert server_options(pack, options, None, 0)[0] == [*options, *cache]
    options = ["-cram", "3"]
    assert server_options(pack, options, None, 0)[0] == [*options, "-ub", "2048"]
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "50")
    assert server_options(pack, [], None, 0)[0] == [*cache, "-ub", "64"]
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "5")
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "-1")
    assert server_options(pack, [], None, 0)[0] == []
