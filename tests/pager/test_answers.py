"""A program answers the same with its experts brought as alone: each token, to the last digit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.packing.shard_index import index_model
from moepack.pager.pager import PagerUsage
from tests.support.llama_program import Answer
from tests.support.models import REAL_MODELS, first_shard, keys_of, pack_model, shards_of
from tests.support.pagers import PROMPTS, Program, answers, paging

Alone = Callable[[str], list[list[Answer] | str]]
Form = Callable[[str, str], Path]
SLOTS = ("--slots", 4, "--micro-batch", 32)
TIGHT = ("--slots", 1, "--micro-batch", 1)


def usage_after(model: Path, expected: list[list[Answer] | str], **options: Any) -> PagerUsage:
    with paging(model, **options) as run:
        with run.program(*SLOTS) as program:
            assert answers(program) == expected
        assert not run.failures
        return run.pager.usage


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
@pytest.mark.parametrize("kind", ["gguf", "pack", "index"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_answers_are_those_of_the_program_alone(
    alone: Alone, form: Form, model: str, kind: str, memory: int | str
) -> None:
    usage = usage_after(form(model, kind), alone(model), memory=memory, micro_batch=32)
    with moepack.open(form(model, "index")) as pack:
        expert_count = len(keys_of(pack))
    if memory == "floor":
        assert usage.miss_count > expert_count  # some were evicted, and brought once more
        assert usage.resident_length <= usage.budget
    else:
        assert 0 < usage.miss_count <= expert_count
    assert usage.fault_count == 0  # the program announced all that it read


@pytest.mark.parametrize("kind", ["gguf", "pack"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_few_experts_in_memory_are_enough(form: Form, model: str, kind: str) -> None:
    with Program(first_shard(model), *TIGHT) as program:
        expected = [program.ask(*prompts) for prompts in PROMPTS]
    with paging(form(model, kind), memory="floor", micro_batch=1) as run:
        with run.program(*TIGHT) as program:
            assert [program.ask(*prompts) for prompts in PROMPTS] == expected
        usage = run.pager.usage
    assert usage.resident_length <= usage.budget < 1 << 20
    assert usage.miss_count > 100


@pytest.mark.parametrize("policy", ["lfu", "layer", "s3fifo", "least-stale", "random"])
def test_policies_and_pins_change_no_answer(alone: Alone, form: Form, policy: str) -> None:
    options = {"memory": 1_200_000, "policy": policy, "pinned": 200_000, "micro_batch": 2}
    usage = usage_after(form("mixtral", "pack"), alone("mixtral"), **options)
    assert usage.miss_count > 16


def masked(folder: Path, model: str) -> Path:
    """Copy a model's shards, with experts that a codec shortens; return the first."""
    folder.mkdir()
    paths = [Path(shutil.copy(path, folder)) for path in shards_of(model)]
    index_model([paths[0]], folder / "index")
    with moepack.open(folder / "index") as pack:
        for layer, expert in keys_of(pack):
            for kind in pack.parts(layer):
                part = pack.locate(layer, expert, kind.name)
                shard = np.memmap(part.path, np.uint8, "r+", part.offset, (part.length,))
                shard &= 0x1F
    return paths[0]


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
def test_parts_that_are_stored_by_a_codec_are_the_same(tmp_path: Path, memory: int | str) -> None:
    model = masked(tmp_path / "model", "qwen3moe")
    pack_model([model], tmp_path / "pack", codec="zstd")
    with moepack.open(tmp_path / "pack") as pack:
        codecs = {pack.locate(*key, "ffn_up_exps.weight").codec for key in keys_of(pack)}
    assert codecs == {"zstd"}
    with Program(model, *SLOTS) as program:
        expected = answers(program)
    usage_after(tmp_path / "pack", expected, memory=memory, micro_batch=32)
