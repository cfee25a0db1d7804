"""The chat of `run`: in a pipe, and on a terminal of its own."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chat_model import write_chat_model
from tests.support.children import PATIENCE
from tests.support.models import first_shard, flip, pack_model
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--memory", "floor", "--threads", "1", "--temperature", "0")
LONG = "x" * 300
"""A line that has no room in a context of 64 tokens."""


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


def answers(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what was said of each answer, its speed left out, or which error ended it."""
    lines = run.stderr.splitlines()[1:]
    return [line.partition(",")[0] for line in lines]


def test_an_outgrown_context_ends_the_answer_and_clear_begins_anew(
    moepack_command: Command, chat_path: Path
) -> None:
    lines = f"hello\n{LONG}\n /clear \nhello\n"
    arguments = ("run", chat_path, "-n", "3", "--context", "64", *SMALL)
    run = moepack_command(*arguments, input=lines)
    assert answers(run) == [
        "3 tokens",
        "error: the prompt does not fit into the context",
        "hint: give it more with --context",
        "hint: /clear forgets what was said so far",
        "3 tokens",
    ]
    assert run.returncode == 2, "where nobody sees the error, the exit code tells of it"
    alone = moepack_command(*arguments, "-p", "hello")
    assert run.stdout == alone.stdout * 2


def test_a_question_without_an_answer_is_forgotten(
    moepack_command: Command, chat_path: Path
) -> None:
    arguments = ("run", chat_path, "-n", "3", "--context", "64", *SMALL)
    plain = moepack_command(*arguments, input="a\nb\n")
    run = moepack_command(*arguments, input=f"a\n{LONG}\nb\n")
    assert (plain.returncode, run.returncode) == (0, 2)
    assert run.stdout == plain.stdout
    assert run.stderr.count("\n3 tokens") == 2


def test_messages_that_the_template_refuses_end_an_answer_alone(
    moepack_command: Command, chat_path: Path
) -> None:
    run = moepack_command("run", chat_path, "-n", "3", "-q", *SMALL, input="refuse\nhello\n")
    problem = "the model's chat template refuses the messages: not this"
    assert run.stderr == f"error: {problem}\n"
    assert run.returncode == 2
    assert run.stdout.startswith(
        moepack_command("run", chat_path, "-n", "3", "-q", *SMALL, "-p", "hello").stdout
    )


def test_a_damaged_expert_ends_an_answer_alone(
    moepack_command: Command, chat_path: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    pack_model([chat_path], pack)
    for path in pack.glob("experts-*.bin"):
        for offset in range(5, path.stat().st_size, 4096):
            flip(path, offset)
    run = moepack_command("run", pack, "-n", "3", "-q", *SMALL, input="hello\n\nagain\n")
    errors = run.stderr.splitlines()[::2]
    assert len(errors) == 2, run.stderr
    assert all(error.startswith("error: ") and "digest" in error for error in errors)
    assert (run.returncode, run.stdout) == (4, "")


def test_what_no_answer_would_have_is_said_before_the_first(moepack_command: Command) -> None:
    run = moepack_command("run", first_shard("qwen3moe"), *SMALL, input="hello\nand again\n")
    assert run.returncode == 2
    error = f"error: {first_shard('qwen3moe')}: the model has no template for chats\n"
    assert run.stderr.count("error: ") == run.stderr.count(error) == 1


def test_lines_that_are_no_text_are_answered(moepack_command: Command, chat_path: Path) -> None:
    arguments = ("run", chat_path, "-n", "3", *SMALL)
    run = moepack_command(*arguments, input="a\udcff\n", errors="surrogateescape")
    assert (run.returncode, answers(run)) == (0, ["3 tokens"]), run.stderr


class Terminal:
    """A chat on a terminal of its own, and what it wrote there so far."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        names = os.environ | {"TERM": "dumb", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moepack", "run", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=names,
            start_new_session=True,
        )
        os.close(theirs)
        self.written = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for words after those that were waited for before; return all up to them."""
        deadline = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self.written)) is None:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, self.written
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")
        head, self.written = self.written[: match.end()], self.written[match.end() :]
        return head

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(chat_path: Path) -> Iterator[Terminal]:
    """Begin a chat whose answers end with the context alone: after thousands of tokens."""
    terminal = Terminal(str(chat_path), *SMALL, "--context", "4096")
    try:
        yield terminal
    finally:
        terminal.close()


def test_an_interruption_ends_the_answer_and_at_the_prompt_the_chat(terminal: Terminal) -> None:
    assert "Ctrl-C ends an answer, /clear begins anew, Ctrl-D ends the chat" in terminal.until("> ")
    for _ in range(2):
        terminal.type("hello\n")
        terminal.until("hello\r\n.")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\n> ")
    terminal.type("refuse\n")  # not the first message: this template minds only that
    terminal.until("refuse\r\n.")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("\n> ")
    terminal.type("/clear\nrefuse\n")
    terminal.until("error: .*not this\r\n> ")
    time.sleep(0.5)
    terminal.process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        terminal.process.wait(10)
    terminal.type("\n")  # on which Python sees a signal that came between prompting and reading
    assert terminal.process.wait(PATIENCE) == 0


def test_a_termination_ends_the_chat_and_not_an_answer_alone(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("hello\r\n.")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(PATIENCE) == 130
