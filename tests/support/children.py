"""What may hang or harm its process is done in another, or in a thread that is given up."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

Result = TypeVar("Result")

MOEPACK = (sys.executable, "-m", "moepack")
"""The command."""

PATIENCE = 60.0
"""Seconds, after which something hangs. Machines are busy: what is right never takes so long."""


def within(work: Callable[[], Result]) -> Result:
    """Do `work` in a thread, and fail where it hangs."""
    results: list[Result] = []
    in_threads(1, lambda _: results.append(work()))
    return results[0]


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call `work` with each number below `count`, each in a thread; raise the first error."""
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"not done after {PATIENCE} s"
    if problems:
        raise problems[0]


def wait_until(condition: Callable[[], object], *, pause: float = 0.005) -> None:
    """Look every `pause` seconds whether something is the case, and fail where it never is."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not so after {PATIENCE} s"
        time.sleep(pause)


class Piped(subprocess.Popen[str]):
    """A process whose streams are pipes with text, but for those that `options` have elsewhere."""

    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def __init__(self, *command: object, **options: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        super().__init__([*map(str, command)], text=True, **(pipes | options))


def run_command(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is; its streams are texts."""
    usual = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
    return subprocess.run([*map(str, command)], **(usual | options))


def run_child(code: str, *arguments: str | Path) -> str:
    """Run `code` in Python's development mode; return what it prints. It may not complain."""
    python = (sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code))
    run = run_command(*python, *arguments, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout
