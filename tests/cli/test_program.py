"""`moepack run MODEL -- PROGRAM`: any program, with its arguments, streams and end as they are."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_command
from tests.support.children import MOEPACK, PATIENCE, Piped
from tests.support.models import first_shard
from tests.support.needs import needs_library, needs_llama
from tests.support.npm_builds import FOLDER, require_node
from tests.support.supervised import PROMPTS, ROOT, Program

pytestmark = pytest.mark.long

Run = subprocess.CompletedProcess[str]
MODULE = "tests.support.llama_program"
QUESTION = json.dumps(PROMPTS[1])


def run(*words: str | Path, question: str = "") -> Run:
    """Run the command; the first of `words` that is no option is the model."""
    arguments = ["run", *map(str, words)]
    return warm_command.run(arguments, input=question, cwd=ROOT, timeout=PATIENCE)


@pytest.fixture(scope="module")
def model(packs: dict[str, Path]) -> Path:
    return packs["qwen3moe"]


@pytest.fixture(scope="module")
def expected() -> str:
    """Return what the program prints by itself."""
    with Program(first_shard("qwen3moe")) as program:
        program.begin(*PROMPTS[1])
        return "ready\n" + program.result_line()


@needs_library
@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -INT $$", -2), ("kill -KILL $$", -9)]
)
def test_it_ends_as_the_program_ends(model: Path, script: str, code: int) -> None:
    assert run(model, "--", "sh", "-c", script).returncode == code


@needs_library
def test_streams_are_the_program_s_own(model: Path) -> None:
    end = run("-q", model, "--", "sh", "-c", "cat; echo oh >&2", question="what came in")
    assert end.stdout == "what came in"
    assert end.stderr.startswith("oh\n")


@needs_library
def test_the_model_s_path_is_an_argument_and_a_variable(model: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['MOEPACK_MODEL'])"
    words = ["{}", "--model={}", "{{}}", "in {} text", '{"a": {}}']
    path = run(model, "--", sys.executable, "-c", code, "{}").stdout.split("'")[1]
    assert path.startswith("/proc/")
    end = run(first_shard("qwen3moe"), "--", sys.executable, "-c", code, *words)
    path = str(first_shard("qwen3moe"))
    filled = [path, f"--model={path}", "{}", "in {} text", '{"a": {}}']
    assert end.stdout == f"{filled} {path}\n"


@needs_library
def test_experts_that_a_program_s_option_adds_count_for_the_least_memory(model: Path) -> None:
    words = ("--memory", "floor", model, "--", "true", "-ub", "1")
    lines = [
        run(*words, *more).stderr
        for more in ((), ("--override-kv", "qwen3moe.expert_used_count=int:8"))
    ]
    needs = [re.findall(r"a step needs ([\d.]+) KiB", line) for line in lines]
    assert [2 * float(need) for need in needs[0]] == [float(need) for need in needs[1]] != []


SHELL = f'{sys.executable} -m {MODULE} "$MOEPACK_MODEL"; exit $?'
RUNPY = f"import runpy; runpy.run_module('{MODULE}', run_name='__main__')"
UV = ["uv", "run", "--no-project", "--offline", "--python", sys.executable]
CALL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@needs_llama
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", MODULE, "{}"],
        ["sh", "-c", SHELL],
        ["sh", "-c", f'sh -c "exec {sys.executable} -m {MODULE} $0" && true', "{}"],
        ["env", sys.executable, "-c", RUNPY, "{}"],
        [sys.executable, "-c", CALL, sys.executable, "-m", MODULE, "{}"],
        [*UV, "python", "-m", MODULE, "{}"],
    ],
    ids=["itself", "a shell", "shells", "env", "a child", "uv"],
)
def test_programs_are_served_however_they_are_started(
    model: Path, expected: str, command: list[str]
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    path = first_shard("qwen3moe") if command[:2] == ["sh", "-c"] else model
    end = run("--memory", "floor", path, "--", *command, question=QUESTION)
    assert (end.returncode, end.stdout) == (0, expected), end.stderr
    first, *_, last = end.stderr.splitlines()
    assert first.startswith("memory for experts: ")
    assert re.search("dense weights [0-9.]+ KiB, context –, .*; all together –", first)
    assert re.match("experts: .* lookups hit", last)


@needs_llama
def test_nothing_is_said_of_a_program_if_it_is_to_be_quiet(model: Path, expected: str) -> None:
    words = ("-q", "--memory", "floor", model, "--", sys.executable, "-m", MODULE, "{}")
    end = run(*words, question=QUESTION)
    assert (end.stdout, end.stderr) == (expected, "")


def test_a_program_of_npx_is_served(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_node()
    script = "tests/support/node_program.mjs"
    monkeypatch.setenv("MOEPACK_NODE", str(FOLDER))
    options: dict[str, Any] = {"input": QUESTION, "capture_output": True, "text": True}
    alone = subprocess.run(["node", script, first_shard("qwen3moe")], cwd=ROOT, **options)
    npx = ["npx", "--offline", "-c", f'node {script} "$MOEPACK_MODEL"']
    end = run("--memory", "floor", model, "--", *npx, question=QUESTION)
    assert (end.returncode, end.stdout) == (0, alone.stdout), end.stderr
    assert "lookups hit" in end.stderr


@needs_llama
@pytest.mark.slow  # they come every five seconds
def test_statistics_come_while_it_runs(model: Path) -> None:
    script = f'(echo "[[1]]"; sleep 7) | {sys.executable} -m {MODULE} "$MOEPACK_MODEL"'
    end = run("--stats", model, "--", "sh", "-c", script)
    assert end.returncode == 0
    assert len([line for line in end.stderr.splitlines() if line.startswith("experts: ")]) == 2


@needs_library
def test_a_program_that_never_mapped_the_model_is_told_of(model: Path, tmp_path: Path) -> None:
    program = shutil.copy("/bin/true", tmp_path / "llama-server")
    end = run(model, "--", program, "--port", "8080")
    assert end.returncode == 0
    assert "no word of this command is the model's path" in end.stderr
    end = run(model, "--", "true")
    assert end.returncode == 0
    assert "no word" not in end.stderr
    assert "the program has ended and never mapped the model" in end.stderr
    assert "have it map the file, not read it (use_mmap" in end.stderr


@needs_library
def test_a_signal_reaches_the_program(model: Path) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with Piped(*MOEPACK, "run", model, "--", "sh", "-c", script, cwd=ROOT) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # a signal in its first milliseconds ends both, as one before
        process.terminate()
        assert process.stdout.read() == "caught\n"
        assert process.wait(PATIENCE) == 5
