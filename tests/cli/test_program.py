"""`moepack run MODEL -- PROGRAM`: any program, with its arguments, streams and end as they are."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import PATIENCE
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.npm_builds import FOLDER, require_node
from tests.support.pagers import PROMPTS, ROOT, Program

Run = subprocess.CompletedProcess[str]
MODULE = "tests.support.llama_program"
CALL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
QUESTION = json.dumps(PROMPTS[1])


def run(*words: str | Path, question: str = "", **names: str) -> Run:
    """Run the command; the first of `words` that is no option is the model."""
    command = [sys.executable, "-m", "moepack", "run", *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": ROOT}
    return subprocess.run(command, input=question, env=os.environ | names, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def model(packs: dict[str, Path]) -> Path:
    return packs["qwen3moe"]


@pytest.fixture(scope="module")
def expected() -> str:
    """Return what the program prints by itself."""
    with Program(first_shard("qwen3moe")) as program:
        program.begin(*PROMPTS[1])
        return "ready\n" + program.result_line()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", -9)]
)
def test_it_ends_as_the_program_ends(model: Path, script: str, code: int) -> None:
    assert run(model, "--", "sh", "-c", script).returncode == code


def test_streams_are_the_program_s_own(model: Path) -> None:
    end = run("-q", model, "--", "sh", "-c", "cat; echo oh >&2", question="what came in")
    assert end.stdout == "what came in"
    assert end.stderr.startswith("oh\n")


def test_the_model_s_path_is_an_argument_and_a_variable(model: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['MOEPACK_MODEL'])"
    words = ["{}", "--model={}", "{{}}", "in {} text", '{"a": {}}']
    path = run(model, "--", sys.executable, "-c", code, "{}").stdout.split("'")[1]
    assert path.startswith("/proc/")
    end = run(first_shard("qwen3moe"), "--", sys.executable, "-c", code, *words)
    path = str(first_shard("qwen3moe"))
    filled = [path, f"--model={path}", "{}", "in {} text", '{"a": {}}']
    assert end.stdout == f"{filled} {path}\n"


@needs_llama
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", MODULE, "{}"],
        ["sh", "-c", f'{sys.executable} -m {MODULE} "$MOEPACK_MODEL"; exit $?'],
        ["sh", "-c", f'sh -c "exec {sys.executable} -m {MODULE} $0" && true', "{}"],
        [
            "env",
            sys.executable,
            "-c",
            f"import runpy; runpy.run_module('{MODULE}', run_name='__main__')",
            "{}",
        ],
        [
            *(
                sys.executable,
                "-c",
                "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
            ),
            *(sys.executable, "-m", MODULE, "{}"),
        ],
    ],
    ids=["itself", "a shell", "shells", "env", "a child"],
)
def test_programs_are_served_however_they_are_started(
    model: Path, expected: str, command: list[str]
) -> None:
    for path in (model, first_shard("qwen3moe")):
        end = run("--memory", "floor", path, "--", *command, question=QUESTION)
        assert (end.returncode, end.stdout) == (0, expected), end.stderr
        assert "lookups hit" in end.stderr


@needs_llama
def test_a_program_of_uv_is_served(model: Path, expected: str) -> None:
    if shutil.which("uv") is None:
        pytest.skip("there is no uv here")
    uv = ["uv", "run", "--no-project", "--offline", "--python", sys.executable]
    end = run(
        "--memory", "floor", model, "--", *uv, "python", "-m", MODULE, "{}", question=QUESTION
    )
    assert (end.returncode, end.stdout) == (0, expected), end.stderr
    assert "lookups hit" in end.stderr


def test_a_program_of_npx_is_served(model: Path) -> None:
    require_node()
    script = "tests/support/node_program.mjs"
    options: dict[str, Any] = {"input": QUESTION, "capture_output": True, "text": True}
    options["env"] = os.environ | {"MOEPACK_NODE": str(FOLDER)}
    alone = subprocess.run(["node", script, first_shard("qwen3moe")], cwd=ROOT, **options)
    npx = ["npx", "--offline", "-c", f'node {script} "$MOEPACK_MODEL"']
    end = run("--memory", "floor", model, "--", *npx, question=QUESTION, **options["env"])
    assert (end.returncode, end.stdout) == (0, alone.stdout), end.stderr
    assert "lookups hit" in end.stderr


@needs_llama
def test_what_was_needed_is_said_unless_it_is_to_be_quiet(model: Path) -> None:
    command = ["--", sys.executable, "-m", MODULE, "{}"]
    loud = run("--memory", "floor", model, *command, question=QUESTION)
    first, *_, last = loud.stderr.splitlines()
    assert first.startswith("memory for experts: ")
    assert last.startswith("experts: ")
    assert run("-q", "--memory", "floor", model, *command, question=QUESTION).stderr == ""


@needs_llama
@pytest.mark.slow  # they come every five seconds
def test_statistics_come_while_it_runs(model: Path) -> None:
    script = f'(echo "[[1]]"; sleep 7) | {sys.executable} -m {MODULE} "$MOEPACK_MODEL"'
    end = run("--stats", model, "--", "sh", "-c", script)
    assert end.returncode == 0
    assert len([line for line in end.stderr.splitlines() if line.startswith("experts: ")]) == 2


def test_a_program_that_never_mapped_the_model_is_told_of(model: Path) -> None:
    end = run(model, "--", "true")
    assert end.returncode == 0
    assert "the program has ended and never mapped the model" in end.stderr
    assert "have it map the file, not read it (use_mmap" in end.stderr


@pytest.mark.parametrize(
    "options", [["-p", "text"], ["--tokens", "3"], ["--temperature", "1"], ["--raw"], ["--json"]]
)
def test_options_of_chats_do_not_go_with_a_program(model: Path, options: list[str]) -> None:
    end = run(*options, model, "--", "touch", "/nowhere/at/all")
    assert end.returncode == 2
    assert "does not go with a program of one's own" in end.stderr
    assert "touch:" not in end.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--no-mmap"], "--no-mmap"),
        (["--load-mode", "none"], "--load-mode none"),
        (["--mlock"], "--mlock"),
    ],
)
def test_programs_that_would_read_all_of_the_model_are_refused(
    model: Path, words: list[str], named: str
) -> None:
    end = run(model, "--", "true", "-m", "{}", *words)
    assert end.returncode == 2
    assert f"with {named} the program reads the whole model into memory" in end.stderr


def test_no_program_is_refused_and_one_that_is_not_there_as_by_shells(model: Path) -> None:
    assert run(model, "--").returncode == 2
    assert run(model, "--", "no-such-program-at-all").returncode == 127
    assert run(model, "--", "/etc/passwd").returncode == 126


def test_too_little_memory_is_refused_before_the_program_starts(model: Path) -> None:
    end = run("--memory", "1KiB", model, "--", "echo", "started")
    assert (end.returncode, end.stdout) == (2, "")
    assert "too little memory for the experts of one step" in end.stderr


@pytest.fixture
def start(model: Path) -> Callable[..., "subprocess.Popen[str]"]:
    def begin(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "moepack", "run", str(model), "--", *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload,no-any-return]

    return begin


def test_a_signal_reaches_the_program(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    with start(
        "sh", "-c", "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # a signal in its first milliseconds ends both, as one before
        process.terminate()
        assert process.stdout.read() == "caught\n"
        assert process.wait(PATIENCE) == 5
