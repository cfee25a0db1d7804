"""Models and options that a supervisor cannot serve are refused before a program starts.

Containers are no reason to refuse: programs are served where they forbid what Docker does.
"""

import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import PackError, RequestError, SourceError
from moepack.pack.opening.open_model import open_model
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from tests.support import seccomp
from tests.support.children import MOEPACK, run_command
from tests.support.models import FIXTURES, first_shard, pack_model
from tests.support.needs import needs_library, needs_llama
from tests.support.odd_models import legacy
from tests.support.supervised import ROOT, SLOTS, Alone, Form, answers, image_of, supervised


def open_supervisor(path: Path, **options: Any) -> Supervisor:
    with open_model([path]) as pack:
        return Supervisor(pack, StreamingOptions(**options), lambda error: None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "clock"}, "no such policy"),
        ({"check": "sometimes"}, "no such check"),
        ({"backend": "carrier pigeon"}, "no such backend"),
    ],
)
def test_what_is_no_option_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        open_supervisor(first_shard("qwen3moe"), **wrong)


def test_what_no_program_can_run_is_refused(tmp_path: Path) -> None:
    alone, apart, broken = (tmp_path / name for name in ("alone", "apart", "broken"))
    pack_model([first_shard("qwen3moe")], alone, experts_only=True)
    pack_model([legacy().write(tmp_path / "m.gguf")], apart)
    pack_model([first_shard("qwen3moe")], broken)
    (broken / "dense.bin").unlink()
    dense = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
    for model, error, words in (
        (alone, PackError, "not a whole pack"),
        (apart, PackError, "a tensor of its own"),
        (broken, PackError, "dense.bin: the file is missing"),
        (dense, SourceError, "no .*expert"),
    ):
        with pytest.raises(error, match=words):
            open_supervisor(model, memory="floor")


needs_numbers = pytest.mark.skipif(
    platform.machine() not in seccomp.USERFAULTFD, reason="the number of its call is not known"
)


@needs_library
@needs_numbers
def test_a_program_in_a_container_reads_all_of_a_pack_right(form: Form, tmp_path: Path) -> None:
    expected = image_of(form("qwen3moe", "pack"), tmp_path / "expected")
    lines = ["import os, runpy, sys", "from tests.support import seccomp", "seccomp.contain()"]
    lines += [f"sys.argv = ['', os.environ['MOEPACK_MODEL'], {str(expected)!r}]"]
    lines += ["runpy.run_module('tests.support.mapped_reader', run_name='__main__')"]
    program = (sys.executable, "-c", "\n".join(lines))
    command = (*MOEPACK, "run", form("qwen3moe", "pack"), "--memory", "floor", "--", *program)
    run = run_command(*command, input='["compare", 2, 1]\n', cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "ready\n0\n"), run.stderr


@needs_llama
@needs_numbers
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_a_program_in_a_container_answers_as_alone(form: Form, alone: Alone, kind: str) -> None:
    with (
        supervised(form("qwen3moe", kind), memory="floor", micro_batch=32) as run,
        run.program(*SLOTS, "--contained") as program,
    ):
        assert answers(program) == alone("qwen3moe")
        assert run.supervisor.usage.miss_count > 0
    assert not run.failures
