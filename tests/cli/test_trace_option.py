"""`--trace FILE` of run and serve: what routers chose is in the file, however the command ends."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import moepack
from tests.support.children import PATIENCE, wait_until
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.supervised import PROMPTS, Command
from tests.support.warm_command import Run

pytestmark = [pytest.mark.long, needs_llama]

SHARD = first_shard("qwen3moe")
SMALL = ("--memory", "floor", "--context", "64", "--threads", "1")
PROGRAM = (sys.executable, "-m", "tests.support.llama_program", "{}")


def counts(path: Path) -> tuple[int, int]:
    """Return how many requests and tokens a trace has, which is read as a whole."""
    summary = moepack.import_trace([str(path)], path.with_suffix(".copy"), force=True)
    return summary.request_count, summary.token_count


def test_each_answer_is_a_request(cli: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.moetrace"
    arguments = ("run", SHARD, "-p", "Hello", "-n", "7", *SMALL, "--trace", trace, "--json")
    facts = json.loads(cli(*arguments).stdout)
    assert counts(trace) == (1, facts["prompt"]["step_count"] + facts["step_count"])


def running(trace: Path) -> Command:
    return Command(SHARD, "--memory", "floor", "--trace", trace, "--", *PROGRAM)


def test_a_program_that_is_interrupted_has_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.moetrace"
    with running(trace) as run:
        run.ask(*PROMPTS[1])
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.wait(PATIENCE)
    assert counts(trace)[0] == 1
    assert not Path(f"{trace}.partial").exists()


def test_what_a_killed_one_leaves_can_be_read(tmp_path: Path) -> None:
    partial = tmp_path / "t.moetrace.partial"
    with running(tmp_path / "t.moetrace") as run:
        run.ask(*PROMPTS[1])
        wait_until(lambda: partial.stat().st_size >= 400)  # it is written each second
        run.process.kill()
        run.process.wait(PATIENCE)
    assert counts(partial)[0] == 1


def test_where_no_router_chose_there_is_no_trace(cli: Run, tmp_path: Path) -> None:
    end = cli("run", SHARD, "--trace", tmp_path / "t", "--", "true")
    assert end.returncode == 0
    assert "no router has selected an expert: no trace was written" in end.stderr
    assert not list(tmp_path.iterdir())
