"""The fixture models in all forms that run, and the answers of programs alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from moepack.packing.shard_index import index_model
from tests.support.models import first_shard
from tests.support.native import compile_with, compiled_once, sources
from tests.support.needs import require_llama
from tests.support.supervised import ROOT, SLOTS, Alone, Answers, Form, Program, answers


@pytest.fixture(scope="session")
def alone() -> Alone:
    """Return the answers of a program without us to PROMPTS, once for each model."""
    require_llama()

    @cache
    def answer(model: str) -> list[Answers]:
        with Program(first_shard(model), *SLOTS) as program:
            return answers(program)

    return answer


@pytest.fixture(scope="session")
def form(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Form:
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


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that compiles a C file of tests/support into a library."""

    @cache
    def compile_library(name: str) -> Path:
        library = tmp_path_factory.mktemp("preloaded") / f"{name}.so"
        source = ROOT / "tests" / "support" / f"{name}.c"
        compile_with("cc", "-shared", "-fPIC", "-o", library, source, "-ldl")
        return library

    return compile_library


@pytest.fixture(scope="session")
def comparing() -> Path:
    """Return the library that compares the experts of each step with their files."""
    flags = ("-O1", "-DCOMPARES", "-shared", "-fPIC", "-fvisibility=hidden")
    return compiled_once("comparing.so", "gcc", *flags, *sources("seam"), "-lm", "-ldl")
