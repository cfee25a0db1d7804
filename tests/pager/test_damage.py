"""What cannot be read as it was written ends an answer: it never becomes other tokens."""

import errno
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.errors import MoepackError, PackError
from moepack.packing.shard_index import index_model
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.llama_program import Answer
from tests.support.models import first_shard, flip, pack_model, shards_of
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, Program, paging

Form = Callable[[str, str], Path]
SLOTS = ("--slots", 4, "--micro-batch", 32)
PROMPT = PROMPTS[1][0]


@pytest.fixture(scope="module")
def expected() -> list[Answer] | str:
    with Program(first_shard("qwen3moe"), *SLOTS) as program:
        return program.ask(PROMPT)


def ask_damaged(program: Program) -> bool:
    """Ask; return whether the program has refused. It may also have ended, with a message."""
    program.begin(PROMPT)
    result = program.result()
    if result is None:
        assert "moepack:" in program.complaint
        assert program.process.wait(60) == 70
        return False
    assert isinstance(result, str), "tokens from damaged experts"
    return True


def assert_goes_on(program: Program, expected: list[Answer] | str) -> None:
    assert program.ask(PROMPT) == expected


def damaged_pack(pack_path: Path) -> Path:
    """Flip a byte in each expert of a layer."""
    with moepack.open(pack_path) as pack:
        places = [pack.locate(1, expert) for expert in range(pack.expert_count(1))]
    for place in places:
        flip(place.path, place.offset + 1000)
    return pack_path


def damaged_index(folder: Path, digests: bool) -> Path:
    """Lay an index over copied shards, and flip a byte in each expert of a layer."""
    folder.mkdir()
    paths = [Path(shutil.copy(path, folder)) for path in shards_of("qwen3moe")]
    index_model([paths[0]], folder / "index", digests=digests)
    with moepack.open(folder / "index") as pack:
        places = [pack.locate(1, n, "ffn_up_exps.weight") for n in range(pack.expert_count(1))]
    for place in places:
        flip(place.path.resolve(), place.offset + place.length // 2)
    return folder / "index"


@needs_llama
@pytest.mark.parametrize("memory", ["floor", 1 << 30])
@pytest.mark.parametrize("kind", ["pack", "index with digests"])
def test_damaged_experts_give_no_tokens(
    pack_copy: Path, tmp_path: Path, kind: str, memory: int | str
) -> None:
    model = damaged_pack(pack_copy) if kind == "pack" else damaged_index(tmp_path / "i", True)
    with paging(model, memory=memory, micro_batch=32, check="always") as run:
        with run.program(*SLOTS) as program:
            assert ask_damaged(program)
            assert ask_damaged(program)  # it is still there, and refuses again
        assert all(isinstance(error, PackError) for error in run.failures)
        assert "layer 1 expert" in str(run.failures[0])


@needs_llama
def test_a_pack_that_is_mended_while_a_program_runs_serves_it_again(
    pack_copy: Path, expected: list[Answer] | str
) -> None:
    damaged_pack(pack_copy)
    with (
        paging(pack_copy, memory="floor", micro_batch=32) as run,
        run.program(*SLOTS) as program,
    ):
        assert ask_damaged(program)
        damaged_pack(pack_copy)  # by XOR: it is as before
        assert_goes_on(program, expected)


@needs_llama
def test_damage_that_page_faults_meet_ends_the_program(pack_copy: Path) -> None:

    damaged_pack(pack_copy)
    with paging(pack_copy, memory="floor", micro_batch=32) as run:
        with run.program(*SLOTS) as program:
            run.watch(False)
            assert not ask_damaged(program)
        assert isinstance(run.failures[0], PackError)


def failing(**what: object) -> FaultyBackend:
    return FaultyBackend(make("buffered"), Fault(**what))  # type: ignore[arg-type]


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
def test_a_drive_that_fails_in_an_answer_ends_that_answer_alone(
    form: Form, expected: list[Answer] | str, kind: str, code: int
) -> None:
    backend = failing(code=code, times=0)
    with (
        paging(form("qwen3moe", kind), memory="floor", micro_batch=32, backend=backend) as run,
        run.program(*SLOTS) as program,
    ):
        assert_goes_on(program, expected)
        for _ in range(3):
            count = len(run.failures)
            backend.faults = [Fault(code=code, times=3)]
            assert ask_damaged(program)
            assert len(run.failures) > count
            assert_goes_on(program, expected)
        assert all(isinstance(error, MoepackError) for error in run.failures)


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_reads_that_come_short_give_no_tokens(
    form: Form, expected: list[Answer] | str, kind: str
) -> None:
    backend = failing(missing=100, times=0)
    with (
        paging(form("qwen3moe", kind), memory="floor", micro_batch=32, backend=backend) as run,
        run.program(*SLOTS) as program,
    ):
        assert_goes_on(program, expected)
        backend.faults = [Fault(missing=100)]
        assert ask_damaged(program)
        backend.faults = []
        assert_goes_on(program, expected)


@needs_llama
def test_damage_on_pages_that_experts_share_ends_the_program(tmp_path: Path) -> None:
    pack_model([first_shard("deepseek2")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack:
        # Of these no part has a page of its own: no digest is looked at but for their neighbours'.
        parts = [pack.locate(3, n, "ffn_gate_exps.weight") for n in (*range(1, 7), *range(9, 15))]
    assert {part.length for part in parts} == {mmap.PAGESIZE + 256}
    for part in parts:
        flip(part.path, part.offset + part.length // 2)
    with paging(tmp_path / "pack", memory="floor", micro_batch=32) as run:
        with run.program(*SLOTS) as program:
            run.watch(False)
            assert not ask_damaged(program)
        assert isinstance(run.failures[0], PackError)
