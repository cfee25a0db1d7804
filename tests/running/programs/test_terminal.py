"""On a terminal a command acts as its program would alone: interrupted, stopped, resized."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground import MODULE
from tests.support.terminals import Terminal

PROMPT = "READY> "
PROGRAM = """
import os, signal
seen = dict.fromkeys((signal.SIGINT, signal.SIGWINCH, signal.SIGCONT), 0)
signal.pthread_sigmask(signal.SIG_BLOCK, seen)
os.write(1, b"started\\n")
while True:
    number = signal.sigwaitinfo(seen).si_signo  # handlers of Python's may count two as one
    seen[number] += 1
    os.write(1, f"got {signal.Signals(number).name} {seen[number]}\\n".encode())
"""


class Shell(Terminal):
    """A shell with job control, on a terminal of its own."""

    def __init__(self) -> None:
        super().__init__("bash", "--norc", "--noprofile", "-i", PS1=PROMPT)
        self.say("stty -echo\n", PROMPT)
        self.say("PS2=; bind 'set enable-bracketed-paste off'\n", PROMPT)

    def say(self, text: str, *words: str) -> str:
        """Type `text`, and return the output once it has all of `words`, in this order."""
        self.type(text)
        return "".join(self.until(re.escape(word)) for word in words)


@pytest.fixture
def shell() -> Iterator[Shell]:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    with Shell() as shell:
        yield shell


def test_keys_reach_the_program_once_and_jobs_are_the_shells(shell: Shell, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shell.say(f"{' '.join(MODULE)} {sys.executable} {program}\n", "started")
    shell.say("\x03", "got SIGINT 1")
    shell.resize(99, 33)
    shell.say("", "got SIGWINCH 1")
    for _ in range(2):
        shell.say("\x1a", "Stopped", PROMPT)
        shell.say("fg\n", "got SIGCONT")
    for count in range(2, 8):
        shell.say("\x03", f"got SIGINT {count}")
    time.sleep(0.2)
    assert "SIGINT" not in shell.say("\x1c", "Quit", PROMPT)
    shell.say("echo code $?\n", "code 131")


def test_a_script_that_is_interrupted_ends_with_its_program(shell: Shell) -> None:
    command = f"sh -c '{' '.join(MODULE)} /bin/sleep 60; echo went on'\n"
    shell.say(command, "pid ")
    assert "went on" not in shell.say("\x03", PROMPT)
    shell.say("echo code $?\n", "code 130")


def test_a_freeze_in_the_foreground_gives_the_prompt_back(shell: Shell) -> None:
    shell.say(f"{' '.join(MODULE)} /bin/sh -c 'kill -STOP $$; exit 9'\n", "Stopped", PROMPT)
    shell.say("fg\n", PROMPT)
    shell.say("echo code $?\n", "code 9")
