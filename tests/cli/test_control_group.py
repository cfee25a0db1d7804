"""`moepack run MODEL -- PROGRAM` in a control group that is smaller than the model."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.control_group import control_group
from tests.support.big_model import LENGTH, write_big_model
from tests.support.children import PATIENCE
from tests.support.needs import needs_llama
from tests.support.pagers import ROOT

pytestmark = [needs_llama, pytest.mark.long]

LIMIT = 800 << 20
"""Of it, 512 MiB are the margin that is left to all else."""
_NUMBERS = random.Random(1)
_PROMPTS = [[_NUMBERS.randrange(3, 500) for _ in range(400)] for _ in range(3)]
QUESTIONS = "".join(f"[{prompt}]\n" for prompt in _PROMPTS)
"""They need nearly all experts: with all of them in memory the group is killed."""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": ROOT}
    return subprocess.run(command, input=QUESTIONS, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_big_model(tmp_path_factory.mktemp("big") / "model.gguf")


def test_a_model_that_is_bigger_runs_to_its_end(model: Path) -> None:
    assert LENGTH > LIMIT
    program = [sys.executable, "-m", "tests.support.llama_program"]
    expected = run([*program, str(model)]).stdout
    with control_group(LIMIT) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = [sys.executable, "-m", "moepack", "run", str(model), "--", *program, "{}"]
        end = run(group.command(command))
    assert (end.returncode, end.stdout) == (0, expected), end.stderr
    assert "lookups hit" in end.stderr
