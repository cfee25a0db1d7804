"""Chunks of an image, which are given up for others: with three, where programs have hundreds."""

from pathlib import Path

import pytest

from tests.support.native import compiled_once, sources
from tests.support.supervised import Program, image_of, supervised


@pytest.fixture(scope="session")
def few_chunks() -> Path:
    flags = ("-O1", "-std=c17", "-shared", "-fPIC", "-fvisibility=hidden", "-DCHUNK_COUNT=3")
    return compiled_once("seam.so", "gcc", *flags, *sources("seam"), "-lm", "-ldl")


@pytest.mark.parametrize(("model", "how"), [("qwen3moe", "renew"), ("gpt-oss", "cover")])
def test_chunks_that_are_given_up_take_nothing_else_with_them(
    packs: dict[str, Path], tmp_path: Path, few_chunks: Path, model: str, how: str
) -> None:
    """Neither experts that are mapped beside them, nor what is mapped where they were."""
    expected = image_of(packs[model], tmp_path / "expected")
    with supervised(packs[model], memory=1 << 30, micro_batch=1) as run:
        names = run.environment | {"LD_PRELOAD": str(few_chunks)}
        with Program(
            run.supervisor.model_path, expected, module="mapped_reader", **names
        ) as program:
            for threads in (1, 4):
                assert program.call("compare", threads, 2) == 0, program.complaint
            assert program.call(how) == 0, program.complaint
        assert not run.failures
