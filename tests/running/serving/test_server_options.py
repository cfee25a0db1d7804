"""Options of llama.cpp's server by memory: micro-batches, and what is kept of earlier texts."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.common.sizes import Size
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.running.serving import server_memory
from moepack.running.serving.server_memory import (
    MICRO_BATCHES,
    MemoryLimits,
    ServerMemory,
    divided_text,
    floor_length,
)
from moepack.running.serving.server_options import server_options
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from tests.support import large_models
from tests.support.needs import needs_llama

MIB = 1 << 20
Large = Callable[[str], Pack]
FREE = 16 << 30


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "available_memory", lambda: FREE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    """Return a function that opens a model of real dimensions, of which only a header is there."""

    @cache
    def write(model: str) -> Path:
        return large_models.write(model, tmp_path_factory.mktemp("large") / "m.gguf")

    return lambda model: open_model([write(model)])


def limits_and_length(large: Large, model: str, *words: str) -> tuple[list[str], int]:
    """Return the options that limit earlier texts, and the length of these."""
    with large(model) as pack:
        return ServerMemory(pack, MemoryLimits()).earlier_texts(words)


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
        ("Qwen3-Next-80B-A3B", ["-cram", "100"], ["--ctx-checkpoints", "3"], 100 + 4 * 3 * 75.375),
        ("Qwen3-Next-80B-A3B", ["-cram", "0", "-np", "1", "-ctxcp", "9"], [], 9 * 75.375),
        ("Gemma-4-26B-A4B", ["-cram", "0"], ["--ctx-checkpoints", "2"], 4 * 2 * 200),
    ],
)
def test_earlier_texts_take_a_small_part_of_the_free_memory(
    model: str, words: list[str], limits: list[str], length: float, large: Large
) -> None:
    """As long as the user says nothing else, and that is counted too."""
    stated, stated_length = limits_and_length(large, model, *words)
    assert stated == limits
    assert stated_length == pytest.approx(length * MIB, rel=0.01)


@needs_llama
def test_limits_of_variables_are_counted(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "5")
    assert limits_and_length(large, "Qwen3-30B-A3B") == ([], 5 * MIB)


def micro_batch(pack: Pack, memory: Size, pinned: Size = 0, words: Sequence[str] = ()) -> int:
    return ServerMemory(pack, MemoryLimits(memory, pinned=pinned)).micro_batch(words)


def chosen(pack: Pack, context: int | None) -> int:
    words = [] if context is None else ["-c", str(context)]
    return micro_batch(pack, 1 << 40, 0, words)


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
        count = micro_batch(pack, memory, pinned)
        with Supervisor(pack, StreamingOptions(memory, pinned=pinned, micro_batch=count), print):
            pass
        counts.add(count)
        assert count == 2048 or floor_length(pack, 2 * count, pinned) > memory
    assert {1, 2048} <= counts


def test_experts_that_an_option_adds_leave_memory_for_fewer_tokens(pack: Pack) -> None:
    more = ["--override-kv", "qwen3moe.expert_used_count=int:8"]
    memory = floor_length(pack, 4, 0)
    assert micro_batch(pack, memory) == 2048
    assert micro_batch(pack, memory, 0, more) == 1


def test_the_floor_is_the_least_of_all(pack: Pack) -> None:
    """With no micro-batch it works with less."""
    count = micro_batch(pack, "floor")
    with Supervisor(pack, StreamingOptions("floor", micro_batch=count), print) as supervisor:
        floor = supervisor.budget
    for fewer in MICRO_BATCHES:
        with pytest.raises(RequestError, match="too little memory for the experts of one step"):
            Supervisor(pack, StreamingOptions(floor - 1, micro_batch=fewer), print)


def test_computing_leaves_memory_to_experts(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "available_memory", lambda: 300 << 20)
    assert chosen(pack, context=8192) == 1024
    monkeypatch.setattr(server_memory, "available_memory", lambda: 1 << 20)
    assert chosen(pack, context=8192) == 512


def test_what_is_said_is_left_alone(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ["--cache-ram", "64"]
    assert server_options(pack, ["-c", "100"]).words == ["-c", "100", *cache, "-ub", "128"]
    for options in (["-ub", "32"], ["--ubatch-size=7"], ["-b", "9"]):
        assert server_options(pack, options).words == [*options, "-c", "2048", *cache]
    options = ["-cram", "3"]
    assert server_options(pack, options).words == [*options, "-c", "2048", "-ub", "2048"]
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "50")
    assert server_options(pack, []).words == [*cache, "-ub", "64"]
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "5")
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "-1")
    assert server_options(pack, []).words == []


GIB = 1 << 30
QWEN = "Qwen3-30B-A3B"
"""96 KiB of context for each token, trained for 40,960 of them, 16.6 GiB of experts."""


@needs_llama
@pytest.mark.parametrize(
    ("free", "limits", "wanted", "count"),
    [
        (16 * GIB, {}, 0, 21504),
        (2 * GIB, {}, 0, 4096),
        (64 * GIB, {}, 0, 40960),
        (16 * GIB, {"memory": 8 * GIB}, 0, 10240),
        (16 * GIB, {"memory": "floor"}, 0, 4096),
        (16 * GIB, {"total": 4 * GIB}, 0, 5120),
        (16 * GIB, {}, 32768, 32768),
        (16 * GIB, {}, 65536, 40960),
        (4 * GIB, {}, 65536, 21504),
        (16 * GIB, {"memory": 14 * GIB}, 65536, 18432),
    ],
)
def test_a_context_takes_an_eighth_of_the_memory_unless_more_is_wanted(
    free: int,
    limits: dict[str, Size],
    wanted: int,
    count: int,
    large: Large,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_memory, "available_memory", lambda: free)
    with large(QWEN) as pack:
        memory = ServerMemory(pack, MemoryLimits(**limits))
        assert memory.context([], wanted) == count


@needs_llama
def test_several_texts_share_a_context_or_divide_it(large: Large) -> None:
    """Each of those that divide it may be as long as the model was trained for."""
    with large(QWEN) as pack:
        memory = ServerMemory(pack, MemoryLimits(total=200 * GIB))
        assert memory.context([]) == memory.context(["-np", "1"]) == 40960
        assert memory.context(["-np", "4"]) == 4 * 40960
        assert memory.context(["-np", "4", "-kvu"]) == 40960
        assert memory.parts(["-np", "4", "-c", "8192"]).context == 8192 * 96 << 10
    note = "each of 4 texts has 2,048 tokens of the context; -kvu lets them share it"
    assert divided_text(["-np", "4", "-c", "8192"]) == note
    for words in (["-np", "4", "-kvu"], ["-np", "1"], []):
        assert divided_text([*words, "-c", "8192"]) is None


def test_of_a_total_experts_get_what_all_else_leaves(pack: Pack) -> None:
    """And a micro-batch is as large as fits."""
    for total in (96 * MIB, 128 * MIB, GIB):
        plan = server_options(pack, [], MemoryLimits(total=total))
        assert plan.beside.total is None
        assert isinstance(plan.memory, int)
        assert plan.beside._replace(experts=plan.memory).total == total
        options = StreamingOptions(plan.memory, micro_batch=int(plan.words[-1]))
        Supervisor(pack, options, print).close()


def test_a_total_that_is_too_small_names_the_parts_and_the_least_that_works(pack: Pack) -> None:
    with pytest.raises(RequestError) as refusal:
        server_options(pack, ["-c", "2048"], MemoryLimits(total=10 * MIB))
    text = str(refusal.value)
    match = re.search(
        r"at least ([0-9.]+) MiB: experts .*, dense weights .*, context of 2,048 tok"
        r"ens .*, computing .*, earlier texts .*, the programs .*, found 10.0 MiB",
        text,
    )
    assert match is not None, text
    least = float(match[1])
    server_options(pack, ["-c", "2048"], MemoryLimits(total=f"{least + 1}MiB"))
    with pytest.raises(RequestError):
        server_options(pack, ["-c", "2048"], MemoryLimits(total=f"{least - 1}MiB"))


def test_a_total_and_a_limit_for_experts_are_not_given_at_once(pack: Pack) -> None:
    with pytest.raises(RequestError, match="`memory` and `total_memory` at once"):
        server_options(pack, [], MemoryLimits("1GiB", "2GiB"))
