"""Experts of more than two MiB: programs map their blobs in huge pages, and nothing beside them."""

import os
from contextlib import closing
from pathlib import Path

import pytest

import moepack
from benchmarks.runnable import Dimensions, write_runnable
from moepack.pack.opening.open_model import open_model
from moepack.running.streaming.mapped_model import map_model
from moepack.running.streaming.table import ExpertTable
from tests.support.needs import require_llama
from tests.support.supervised import Program, length_of, slots_of, supervised

MIB = 1 << 20
PROMPT = [(7 * number + 3) % 500 for number in range(40)]


@pytest.fixture(scope="module")
def long_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model of one layer with 128 experts of 2.8 MiB, and its pack."""
    require_llama()
    folder = tmp_path_factory.mktemp("long")
    model = write_runnable(folder / "m.gguf", Dimensions(layers=1))
    moepack.pack_model(model, folder / "m.moepack")
    return model, folder / "m.moepack"


def test_blobs_are_mapped_in_huge_pages_and_what_follows_them_has_no_memory(
    long_experts: tuple[Path, Path],
) -> None:
    """More experts are used than fit."""
    model, pack = long_experts
    with Program(model, "--slots", 1, "--micro-batch", 1) as program:
        expected = program.ask(PROMPT)
    with (
        supervised(pack, memory=64 * MIB, micro_batch=1) as run,
        run.program("--slots", 1, "--micro-batch", 1) as program,
    ):
        assert program.ask(PROMPT) == expected
        slots = slots_of(program.process.pid)
        mappings = Path(f"/proc/{program.process.pid}/smaps").read_text().split("moepack-experts")
        usage = run.supervisor.usage
        assert 32 * MIB < usage.resident_length <= 64 * MIB < usage.read_length
        assert length_of(slots) <= 64 * MIB + 2 * MIB, "what is behind a slot"
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("this kernel collapses no shared memory into huge pages")
    huge = [int(one.split("ShmemPmdMapped:")[1].split()[0]) for one in mappings[1:]]
    assert sum(huge) - max(huge) >= 16 * 1024, "KiB, beside the library's own mapping of all slots"


@pytest.mark.parametrize(("model", "has_blobs"), [("qwen3moe", True), ("deepseek2", False)])
def test_experts_of_some_types_stay_where_a_gguf_has_them(
    packs: dict[str, Path], model: str, has_blobs: bool
) -> None:
    """llama.cpp rounds products of IQ4_XS otherwise where experts are apart."""
    with open_model([packs[model]]) as pack, closing(map_model(pack)) as mapped:
        assert ExpertTable(pack, mapped).has_blobs == has_blobs
