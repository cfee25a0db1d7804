"""On a terminal a command acts as its program would alone: interrupted, stopped, resized."""

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import PATIENCE
from tests.support.foreground import MODULE

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


class Shell:
    """A shell with job control, on a terminal of its own."""

    def __init__(self) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.environ["PS1"] = PROMPT
            os.execv(shutil.which("bash") or "", ["bash", "--norc", "--noprofile", "-i"])
        self.say("stty -echo\n", PROMPT)
        self.say("PS2=; bind 'set enable-bracketed-paste off'\n", PROMPT)

    def say(self, text: str, *words: str) -> str:
        """Type `text`, and return the output once it has all of `words`, in this order."""
        os.write(self.descriptor, text.encode())
        written, end = "", time.monotonic() + PATIENCE
        pattern = ".*".join(map(re.escape, words))
        while not re.search(pattern, written, re.DOTALL):
            assert time.monotonic() < end, f"{words} are not in {written!r}"
            if select.select([self.descriptor], [], [], 0.1)[0]:
                written += os.read(self.descriptor, 1 << 16).decode()
        return written


@pytest.fixture
def shell() -> Iterator[Shell]:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    shell = Shell()
    yield shell
    os.close(shell.descriptor)  # it hangs up, and the shell ends with what it started
    os.waitpid(shell.pid, 0)


def test_keys_reach_the_program_once_and_jobs_are_the_shells(shell: Shell, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shell.say(f"{' '.join(MODULE)} {sys.executable} {program}\n", "started")
    shell.say("\x03", "got SIGINT 1")
    fcntl.ioctl(shell.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
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
    written = shell.say(
        f"{' '.join(MODULE)} /bin/sh -c 'kill -STOP $$; exit 9'\n", "Stopped", PROMPT
    )
    assert "pid " in written
    shell.say("fg\n", PROMPT)
    shell.say("echo code $?\n", "code 9")
