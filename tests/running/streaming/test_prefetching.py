"""Experts that the next layer's router names are read early, and change nothing but the time."""

from pathlib import Path

import pytest

from moepack.packing.pack_model import pack_model
from moepack.report.measure_text import expert_usage, prefetches_text
from moepack.running.streaming.control import ExpertUsage, Prefetches
from tests.support import architectures
from tests.support.needs import needs_llama
from tests.support.supervised import Answers, Form, supervised

LAYERS, EXPERTS = 8, 16
PROMPTS = ([5, 9, 200, 31], [7, 7, 8])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with many layers, whose residuals outweigh what each layer adds."""
    path = tmp_path_factory.mktemp("deep") / "m.gguf"
    return architectures.write("qwen3moe", path, block_count=LAYERS, expert_count=EXPERTS)


def room(memory: int, reserve: int) -> int:
    """Return what guesses leave free of the memory."""
    return min(3 * reserve, memory // 32)


def ask(path: Path, *, prefetch: bool, tokens: int = 60) -> tuple[list[Answers], ExpertUsage]:
    """Return the answers with half of the experts in memory, and as much free for guesses."""
    with supervised(path, memory=1 << 40, micro_batch=1) as run:
        memory, reserve = run.supervisor.whole_length // 2, run.supervisor._reserve
    if not prefetch:
        memory -= room(memory, reserve)
    with (
        supervised(path, memory=memory, micro_batch=1, prefetch=prefetch) as run,
        run.program("--micro-batch", 1, "--tokens", tokens) as program,
    ):
        return [program.ask(prompt) for prompt in PROMPTS], run.supervisor.usage


@needs_llama
@pytest.mark.parametrize("kind", ["gguf", "pack"])
def test_prefetching_changes_neither_answers_nor_misses(
    model: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "pack":
        pack_model(model, tmp_path / "p")
    path = model if kind == "gguf" else tmp_path / "p"
    (expected, without), (answers, usage) = (ask(path, prefetch=one) for one in (False, True))
    assert answers == expected
    assert (usage.hit_count, usage.miss_count) == (without.hit_count, without.miss_count)
    assert without.prefetches == Prefetches()
    assert usage.prefetches.guessed_count > usage.prefetches.right_count > 100
    assert usage.prefetches.read_count >= usage.prefetches.used_count > 10
    assert usage.prefetches.control_count == usage.prefetches.control_right_count > 0
    assert usage.wasted_length > 0


@needs_llama
def test_what_is_prefetched_is_said(model: Path) -> None:
    _, usage = ask(model, prefetch=True, tokens=20)
    share = usage.prefetches.right_count / usage.prefetches.guessed_count
    assert f"next layer's experts guessed {share:.1%} right" in expert_usage(usage)
    assert "prefetched" not in prefetches_text(Prefetches())


def test_routers_that_are_not_found_end_it(form: Form, ggml: Path) -> None:
    """Graphs without a router, only its selection."""
    path = form("qwen3moe", "gguf")
    with supervised(path, memory="floor", micro_batch=1) as run, run.chooser(ggml, path) as program:
        graphs = [(0, 0, [[number % 16]], 1) for number in range(64)]
        assert program.call(graphs) == [[0] * len(graphs)]
        prefetches = run.supervisor.usage.prefetches
    assert prefetches.is_off
    assert prefetches.control_count < len(graphs), "it is not tried for ever"
    assert "nothing prefetched" in prefetches_text(prefetches)
