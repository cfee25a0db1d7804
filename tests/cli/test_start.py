"""A Ctrl-C while the program starts: real processes, interrupted by a real signal in an import."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.children import run_command
from tests.support.models import first_shard

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).parent / "moepack"

# Python itself imports this file before all else.
SITE = """
import os, signal, sys

class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MODULE"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, getattr(signal, os.environ["HANDLER"]))
sys.meta_path.insert(0, Interruption())
"""

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["the module", "the command"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Start moepack in both ways; a signal comes when it first imports `module`."""
    program = [sys.executable, "-m", "moepack"]
    if request.param == "the command":
        if not SCRIPT.exists():
            pytest.skip("the moepack command is not installed beside this Python")
        program = [str(SCRIPT)]
    (tmp_path / "sitecustomize.py").write_text(SITE)

    def run(
        module: str, *arguments: str | Path, handler: str = "default_int_handler"
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"MODULE": module, "HANDLER": handler}
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
        return run_command(*program, *arguments, env=environment)

    return run


@pytest.mark.parametrize("module", ["moepack.cli.main", "click", "moepack.common.errors"])
def test_an_interruption_while_the_program_starts_is_no_traceback(
    module: str, start: Start
) -> None:
    run = start(module, "--help")
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    "module", ["moepack.inspection.describe", "dataclasses", "moepack.source.shards"]
)
def test_an_interruption_while_a_command_loads_its_rooms_is_no_traceback(
    module: str, start: Start
) -> None:
    run = start(module, "inspect", first_shard("mixtral"))
    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr.lstrip("\n") == "error: interrupted\n"  # click ends the line of the ^C


def test_a_signal_that_is_ignored_stays_ignored(start: Start) -> None:
    """As in the background of a shell without job control."""
    run = start("click", "--help", handler="SIG_IGN")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: moepack")
