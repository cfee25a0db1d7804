"""The fixture models in the forms that a pager takes, and what programs answer without one."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from moepack.packing.shard_index import index_model
from tests.support.llama_program import Answer
from tests.support.models import first_shard
from tests.support.needs import require_llama
from tests.support.pagers import Program, answers

SLOTS = ("--slots", 4, "--micro-batch", 32)


@pytest.fixture(scope="session")
def alone() -> Callable[[str], list[list[Answer] | str]]:
    """Return what a program without us answers to PROMPTS, once for each model."""
    require_llama()

    @cache
    def answer(model: str) -> list[list[Answer] | str]:
        with Program(first_shard(model), *SLOTS) as program:
            return answers(program)

    return answer


@pytest.fixture(scope="session")
def form(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a model as it lies, packed, or in the directory of an index."""

    @cache
    def path(model: str, kind: str) -> Path:
        if kind == "gguf":
            return first_shard(model)
        if kind == "pack":
            return packs[model]
        folder = tmp_path_factory.mktemp("indexes") / model
        index_model([first_shard(model)], folder)
        return folder

    return path
