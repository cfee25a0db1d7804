"""Builds of llama.cpp that are not ours, from npm: v0.5.0, for processors and for Vulkan.

Token ids, and with them the digests of all logits, are those of the same program alone.
"""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from moepack.running.streaming.control import ExpertUsage
from tests.support.models import I_QUANTS, REAL_MODELS, first_shard
from tests.support.npm_builds import require_build, require_software_gpu
from tests.support.supervised import Form, Program, supervised

_NUMBERS = random.Random(1)
PROMPTS = [[_NUMBERS.randrange(3, 500) for _ in range(count)] for count in (100, 9, 1)]
PROMPTS.append(PROMPTS[0][:64])  # rounding that other prompts hide
LONG_PROMPTS = [PROMPTS[0][:64]]
"""From 32 tokens on experts are copied to a GPU. Other prompts after such a one crash lavapipe."""
SHORT_PROMPTS = PROMPTS[1:3]
"""Longer ones crash lavapipe where experts are on the GPU, with us or alone."""
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps"


@pytest.fixture(scope="session")
def plain(preloaded: Callable[[str], Path]) -> dict[str, str]:
    """Return the variable by which a program alone computes with the same kernels."""
    return {"LD_PRELOAD": str(preloaded("plain_callback"))}


@pytest.fixture(scope="session")
def cpu_answers(plain: dict[str, str]) -> Callable[[str], Any]:
    """Return the answers of the build for processors alone, once for each model."""
    build = require_build("linux-x64")

    @cache
    def answer(model: str) -> Any:
        with Program(first_shard(model), build, module="c_api_program", **plain) as program:
            answers = program.call(*PROMPTS)
            assert answers, program.complaint
            return answers

    return answer


@pytest.mark.parametrize("kind", ["gguf", "pack"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_another_version_of_llama_cpp_answers_the_same(
    form: Form, cpu_answers: Callable[[str], Any], model: str, kind: str
) -> None:
    with supervised(form(model, kind), memory="floor") as run:
        build = require_build("linux-x64")
        with run.program(build, module="c_api_program") as program:
            assert program.call(*PROMPTS) == cpu_answers(model)
        usage = run.supervisor.usage
    assert usage.miss_count > 0
    assert usage.fault_count == 0 or (kind == "pack" and model in I_QUANTS)


@pytest.fixture(scope="session")
def vulkan_answers(plain: dict[str, str]) -> Callable[[str], Any]:
    """Return the answers of the build for Vulkan alone, once for the tensors that it has not."""
    build, names = require_build("linux-x64-vulkan"), plain | require_software_gpu()
    start = partial(Program, first_shard("qwen3moe"), build, module="c_api_program", **names)

    @cache
    def answer(on_cpu: str) -> Any:
        started = partial(start, "--gpu-layers", 99, "--on-cpu", on_cpu)
        return answers_of(started, LONG_PROMPTS if on_cpu == EXPERTS else SHORT_PROMPTS)

    def answer_or_skip(on_cpu: str) -> Any:
        if (answers := answer(on_cpu)) is None:
            pytest.skip("this software GPU crashes by itself")
        return answers

    return answer_or_skip


def answers_of(start: Callable[[], Program], prompts: list[list[int]]) -> Any:
    """Ask a program, and again where it crashes: lavapipe does so by itself now and then."""
    for _ in range(4):
        with start() as program:
            if answers := program.call(*prompts):
                return answers
    return None


@pytest.mark.parametrize("kind", ["gguf", "pack"])
def test_a_gpu_computes_the_rest_and_prompts_with_experts_that_are_brought(
    form: Form, vulkan_answers: Callable[[str], Any], kind: str
) -> None:
    """Of a long prompt llama.cpp copies experts to the GPU, when they were chosen."""
    build, gpu = require_build("linux-x64-vulkan"), require_software_gpu()
    expected = vulkan_answers(EXPERTS)
    options = (build, "--gpu-layers", 99, "--on-cpu", EXPERTS)
    settings: Any = {"module": "c_api_program", **gpu}
    with supervised(form("qwen3moe", kind), memory="floor") as run:
        start = partial(run.program, *options, **settings)
        assert answers_of(start, LONG_PROMPTS) == expected
        usage = run.supervisor.usage
    assert usage.miss_count > 0
    assert usage.fault_count == 0 or kind == "pack", "of a pack, pages that experts share"


@pytest.mark.parametrize("kind", ["gguf", "pack"])
@pytest.mark.parametrize(("on_cpu", "layers_on_cpu"), [("", 0), (r"blk\.0\." + EXPERTS[2:], 1)])
def test_experts_that_a_gpu_has_for_good_are_not_brought(
    form: Form, vulkan_answers: Callable[[str], Any], kind: str, on_cpu: str, layers_on_cpu: int
) -> None:
    """Once they were copied, as `-ngl` and `-ncmoe` of llama.cpp's programs have it."""
    build, gpu = require_build("linux-x64-vulkan"), require_software_gpu()
    expected = vulkan_answers(on_cpu)
    options = (build, "--gpu-layers", 99, "--on-cpu", on_cpu)
    settings: Any = {"module": "c_api_program", **gpu}
    with supervised(form("qwen3moe", kind), memory="floor", records=True) as run:
        with run.program(*options, **settings) as program:
            loaded = run.supervisor.usage
            assert program.call(*SHORT_PROMPTS) == expected
        usage = run.supervisor.usage
        calls = run.supervisor.pop_calls(with_open=True)
    chosen = [one.layers[layer] for one in calls for layer in range(layers_on_cpu)]
    needed = sum(len(set(rows.flatten().tolist())) for rows in chosen)
    assert bool(needed) == bool(layers_on_cpu)
    assert lookups(usage) - lookups(loaded) == needed
    assert (usage.read_length > loaded.read_length) == bool(layers_on_cpu)
    assert usage.fault_count == loaded.fault_count or (kind == "pack" and layers_on_cpu)


def test_layers_that_a_gpu_has_for_good_are_computed_as_without_us(form: Form) -> None:
    """Where nobody wants their selections: what is looked at is not fused, and rounds otherwise."""
    build, gpu = require_build("linux-x64-vulkan"), require_software_gpu()
    options = (build, "--gpu-layers", 99)
    settings: Any = {"module": "c_api_program", **gpu}
    alone = partial(Program, first_shard("qwen3moe"), *options, **settings)
    if (expected := answers_of(alone, SHORT_PROMPTS)) is None:
        pytest.skip("this software GPU crashes by itself")
    with supervised(form("qwen3moe", "gguf"), memory="floor", counts=True) as run:
        assert answers_of(partial(run.program, *options, **settings), SHORT_PROMPTS) == expected


def lookups(usage: ExpertUsage) -> int:
    return usage.hit_count + usage.miss_count
