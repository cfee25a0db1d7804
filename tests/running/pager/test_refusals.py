"""Models and options that a pager cannot serve are refused before a program starts."""

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import PackError, RequestError, SourceError
from moepack.pack.opening.open_model import open_model
from moepack.running.pager.pager import Pager, PagerOptions
from tests.support import seccomp
from tests.support.children import MOEPACK, PATIENCE
from tests.support.models import FIXTURES, first_shard, pack_model
from tests.support.odd_models import legacy
from tests.support.pagers import ROOT, Form, image_of


def open_pager(path: Path, **options: Any) -> Pager:
    with open_model([path]) as pack:
        return Pager(pack, PagerOptions(**options), lambda error: None)


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
        open_pager(first_shard("qwen3moe"), **wrong)


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
            open_pager(model, memory="floor")


def run_filtered(pack: Path, expected: Path, *filters: str) -> subprocess.CompletedProcess[str]:
    """Have a program read all of a pack in which the kernel refuses some system calls."""
    module = "tests.support.mapped_reader"
    lines = ["import os, runpy, sys", "from tests.support import seccomp", *filters]
    lines += [f"sys.argv = ['', os.environ['MOEPACK_MODEL'], {str(expected)!r}]"]
    lines += [f"runpy.run_module({module!r}, run_name='__main__')"]
    program = (sys.executable, "-c", "\n".join(lines))
    command = (*MOEPACK, "run", pack, "--memory", "floor", "--", *program)
    return subprocess.run(
        command, input='["compare", 1, 1]\n', text=True, capture_output=True, cwd=ROOT,
        timeout=PATIENCE,
    )  # fmt: skip


@pytest.mark.skipif(
    platform.machine() not in seccomp.USERFAULTFD, reason="the number of its call is not known"
)
def test_a_program_that_may_not_have_page_faults_is_told_from_one_that_maps_nothing(
    form: Form, tmp_path: Path
) -> None:
    pack, calls = form("qwen3moe", "pack"), (seccomp.USERFAULTFD, seccomp.OPENAT)
    expected = image_of(pack, tmp_path / "expected")
    call, opening = (numbers[platform.machine()] for numbers in calls)
    no_call = f"seccomp.forbid({call}, {errno.EPERM})"
    no_device = f"seccomp.forbid({opening}, {errno.EACCES}, {os.O_RDWR})"
    if os.access("/dev/userfaultfd", os.R_OK | os.W_OK):
        run = run_filtered(pack, expected, no_call)
        assert (run.returncode, run.stdout) == (0, "ready\n0\n"), run.stderr
    run = run_filtered(pack, expected, no_call, no_device)
    assert run.returncode == 70
    assert "refuses it to the program: Operation not permitted" in run.stderr
    assert "moepack restore" in run.stderr
    assert "never mapped" not in run.stderr
