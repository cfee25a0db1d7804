"""Options of llama.cpp's server by memory: micro-batches, and what is kept of earlier texts."""

from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.serving import server_options as options_by_memory
from moepack.running.serving.server_options import (
    MICRO_BATCHES,
    choose_micro_batch,
    earlier_texts,
    floor_length,
    server_options,
)
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from tests.support import large_models
from tests.support.needs import needs_llama
from tests.support.values import some

MIB = 1 << 20
FREE = 16 << 30


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_by_memory, "available_memory", lambda: FREE)


def footprint(model: str, folder: Path) -> Footprint:
    return footprint_of(large_models.write(model, folder / "m.gguf"))


def limits_and_length(footprint: Footprint, *words: str) -> tuple[list[str], int]:
    """Return the options that limit earlier texts, and the length of these."""
    limits, beside = earlier_texts(footprint, words)
    return limits, beside - some(footprint.weights.read_dense_length)


@needs_llama
@pytest.mark.parametrize(
    ("model", "words", "limits", "length"),
    [
        ("Qwen3-30B-A3B", ["-c", "4096"], ["--cache-ram", "384"], 384),
        ("Qwen3-30B-A3B", ["-c", "32768"], ["--cache-ram", "1024"], 1024),
        ("Qwen3-30B-A3B", ["-c", "32"], ["--cache-ram", "64"], 64),
        ("Qwen3-30B-A3B", ["-c", "4096", "-cram", "0"], [], 0),
        ("Qwen3-30B-A3B", ["-c", "4096", "-cram", "-1"], [], 384),
        ("gpt-oss-120b", ["--cache-ram=100", "-np", "1"], ["--ctx-checkpoints", "32"], 244),
        (
            "Qwen3-Next-80B-A3B",
            ["-cram", "100"],
            ["--ctx-checkpoints", "3"],
            100 + 4 * 3 * 75.375,
        ),
        ("Qwen3-Next-80B-A3B", ["-cram", "0", "-np", "1", "-ctxcp", "9"], [], 9 * 75.375),
        ("Gemma-4-26B-A4B", ["-cram", "0"], ["--ctx-checkpoints", "2"], 4 * 2 * 200),
    ],
)
def test_earlier_texts_take_a_small_part_of_the_free_memory(
    model: str, words: list[str], limits: list[str], length: float, tmp_path: Path
) -> None:
    """As long as the user says nothing else, and that is counted too."""
    stated, stated_length = limits_and_length(footprint(model, tmp_path), *words)
    assert stated == limits
    assert stated_length == pytest.approx(length * MIB, rel=0.01)


@needs_llama
def test_limits_of_variables_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "5")
    assert limits_and_length(footprint("Qwen3-30B-A3B", tmp_path)) == ([], 5 * MIB)


def chosen(pack: Pack, context: int | None) -> int:
    words = [] if context is None else ["-c", str(context)]
    return choose_micro_batch(pack, footprint_of(pack), words, 1 << 40, 0)


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
    """The supervisor accepts the micro-batch, and twice as much would need too much memory."""
    counts = set()
    for memory in range(floor_length(pack, 1, pinned), 2 << 20, 1 << 16):
        count = choose_micro_batch(pack, footprint_of(pack), (), memory, pinned)
        with Supervisor(pack, StreamingOptions(memory, pinned=pinned, micro_batch=count), print):
            pass
        counts.add(count)
        assert count == 2048 or floor_length(pack, 2 * count, pinned) > memory
    assert {1, 2048} <= counts


def test_experts_that_an_option_adds_leave_memory_for_fewer_tokens(pack: Pack) -> None:
    more = ["--override-kv", "qwen3moe.expert_used_count=int:8"]
    limits = floor_length(pack, 4, 0), 0
    assert choose_micro_batch(pack, footprint_of(pack), (), *limits) == 2048
    assert choose_micro_batch(pack, footprint_of(pack), more, *limits) == 1


def test_the_floor_is_the_least_of_all(pack: Pack) -> None:
    """With no micro-batch it works with less."""
    count = choose_micro_batch(pack, footprint_of(pack), (), "floor", 0)
    with Supervisor(pack, StreamingOptions("floor", micro_batch=count), print) as supervisor:
        floor = supervisor.budget
    for fewer in MICRO_BATCHES:
        with pytest.raises(RequestError, match="too little memory for the experts of one step"):
            Supervisor(pack, StreamingOptions(floor - 1, micro_batch=fewer), print)


def test_computing_leaves_memory_to_experts(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_by_memory, "available_memory", lambda: 300 << 20)
    assert chosen(pack, context=8192) == 1024
    monkeypatch.setattr(options_by_memory, "available_memory", lambda: 1 << 20)
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
