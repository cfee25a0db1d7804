"""Bytes that cannot be read as they were written end an answer: they become no tokens."""

import errno
import mmap
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, PackError
from tests.support.models import first_shard, flip, pack_model
from tests.support.needs import needs_llama
from tests.support.supervised import PROMPTS, SLOTS, Alone, Form, Program, supervised

pytestmark = needs_llama
PROMPT = PROMPTS[1][0]
Preloaded = Callable[[str], Path]


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


def assert_ends(program: Program) -> None:
    """Assert that a program ends with a message while it computes its first tokens."""
    assert program.result() is None
    assert program.process.wait(60) == 70
    words = "expected xxh3:", "its digest", "the file has become shorter"
    assert any(one in program.complaint for one in words)


def damage(pack_path: Path, folder: Path | None = None, layers: Sequence[int] = (1,)) -> None:
    """Flip a byte in each expert of some layers, of the pack or of its mirror in a folder."""
    with moepack.open(pack_path) as pack:
        keys = [(layer, expert) for layer in layers for expert in range(pack.expert_count(layer))]
        places = [pack.locate(*key) for key in keys]
    for place in places:
        flip((folder or place.path.parent) / place.path.name, place.offset + 1000)


@pytest.mark.parametrize("memory", ["floor", 1 << 30])
def test_damaged_experts_give_no_tokens(pack_copy: Path, memory: int | str) -> None:
    damage(pack_copy)
    with supervised(pack_copy, memory=memory, micro_batch=32, check="always") as run:
        with run.program(*SLOTS) as program:
            assert ask_damaged(program)
            assert ask_damaged(program)  # it is still there, and refuses again
        run.settle()
        assert all(isinstance(error, PackError) for error in run.failures)
        error = run.failures[0]
        assert error.path is not None
        assert error.path.startswith(str(pack_copy))
        assert re.fullmatch(
            r"layer 1 expert \d+ ffn_\w+_exps.weight at byte [\d,]+", error.place or ""
        )
        assert [str(one)[:5] for one in (error.expected, error.found)] == ["xxh3:"] * 2
        assert error.hint == "run `moepack verify` on the pack"


def test_a_later_read_that_is_damaged_ends_an_answer_as_a_first_one_does(pack_copy: Path) -> None:
    """One of many is compared again, and counted; the drive was right when it was read first."""
    with moepack.open(pack_copy) as pack:
        layers = pack.layers
    with supervised(pack_copy, memory="floor", micro_batch=32, backend="buffered") as run:
        with run.program(*SLOTS) as program:
            for _ in range(100):
                assert isinstance(program.ask(PROMPT), list)
                if run.supervisor.usage.rechecked_count:
                    break
            assert run.supervisor.usage.rechecked_count in (1, 2)
            damage(pack_copy, layers=layers)
            for _ in range(100):
                program.begin(PROMPT)
                if isinstance(program.result(), str):
                    break
        run.settle()
        error = run.failures[0]
        assert isinstance(error, PackError)
        assert str(error.expected).startswith("xxh3:")
        assert re.match(r"layer \d expert \d+ ffn_\w+_exps.weight at byte", error.place or "")


def test_a_mirror_that_is_damaged_changes_no_answer(
    pack_copy: Path, alone: Alone, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    moepack.mirror_pack(pack_copy, tmp_path / "second")
    (folder,) = (tmp_path / "second").iterdir()
    damage(pack_copy, folder)
    with supervised(pack_copy, memory="floor", micro_batch=32, check="always") as run:
        with run.program(*SLOTS) as program:
            assert program.ask(PROMPT) == alone("qwen3moe")[1]
        assert not run.failures


def test_a_mirror_that_is_no_more_is_warned_of(pack_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    moepack.mirror_pack(pack_copy, tmp_path / "second")
    shutil.rmtree(tmp_path / "second")
    with (
        pytest.warns(moepack.MirrorWarning, match="this mirror is not read: not there"),
        supervised(pack_copy, memory="floor", micro_batch=32),
    ):
        pass


def test_damage_that_faults_meet_ends_the_program(pack_copy: Path, preloaded: Preloaded) -> None:
    damage(pack_copy)
    with supervised(pack_copy, memory="floor", micro_batch=32) as run:
        assert_ends(run.program(*SLOTS, before=preloaded("unwatched")))
        run.settle()
        assert isinstance(run.failures[0], PackError)


@pytest.mark.parametrize("kind", ["pack", "gguf"])
@pytest.mark.parametrize("fault", [f"errno {errno.EIO}", f"errno {errno.ENODEV}", "astray 512"])
def test_a_drive_that_fails_in_an_answer_ends_that_answer_alone(
    form: Form, alone: Alone, preloaded: Preloaded, tmp_path: Path, kind: str, fault: str
) -> None:
    if kind == "gguf" and fault.startswith("astray"):
        pytest.skip("digests of shards are not known")
    expected, faults = alone("qwen3moe")[1], tmp_path / "faults"
    with (
        supervised(
            form("qwen3moe", kind),
            memory="floor",
            micro_batch=32,
            backend="buffered",
            check="always",
        ) as run,
        run.program(*SLOTS, before=preloaded("faulty_reads"), FAULTY_READS=str(faults)) as program,
    ):
        assert program.ask(PROMPT) == expected
        for _ in range(2):
            count = len(run.failures)
            faults.write_text(f"{fault} 0 {1 << 40}")
            assert ask_damaged(program)
            run.settle()
            assert len(run.failures) > count
            faults.unlink()
            assert program.ask(PROMPT) == expected
        for error in run.failures:
            assert isinstance(error, PackError if fault.startswith("astray") else MachineError)
            assert os.path.exists(error.path or "")
            assert (error.place or "").startswith("layer ")


@pytest.mark.parametrize("kind", ["pack", "gguf"])
@pytest.mark.parametrize("fault", ["slow 3", "short 100"])
def test_reads_that_are_slow_or_come_short_change_no_answer(
    form: Form, alone: Alone, preloaded: Preloaded, tmp_path: Path, kind: str, fault: str
) -> None:
    faults = tmp_path / "faults"
    faults.write_text(f"{fault} 0 {1 << 40}")
    with (
        supervised(form("qwen3moe", kind), memory="floor", micro_batch=32, backend="direct") as run,
        run.program(*SLOTS, before=preloaded("faulty_reads"), FAULTY_READS=str(faults)) as program,
    ):
        assert program.ask(PROMPT) == alone("qwen3moe")[1]
    assert not run.failures


@pytest.mark.parametrize("is_cut", [False, True])
def test_damage_on_pages_that_experts_share_ends_the_program(
    tmp_path: Path, preloaded: Preloaded, is_cut: bool
) -> None:
    pack_model([first_shard("deepseek2")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack:
        # Of these no part has a page of its own.
        parts = [pack.locate(3, n, "ffn_gate_exps.weight") for n in (*range(1, 7), *range(9, 15))]
    assert {part.length for part in parts} == {mmap.PAGESIZE + 256}
    with supervised(tmp_path / "pack", memory="floor", micro_batch=32) as run:
        for part in parts:
            flip(part.path, part.offset + part.length // 2)
        if is_cut:
            os.truncate(parts[0].path, parts[0].offset)
        program = run.program(*SLOTS, before=preloaded("unwatched"))
        assert_ends(program)
        assert ("the file has become shorter" in program.complaint) == is_cut
        run.settle()
        assert isinstance(run.failures[0], PackError)
