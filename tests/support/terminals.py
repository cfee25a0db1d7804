"""Commands on terminals: real ones, of the system."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from threading import Thread

from tests.support.children import PATIENCE

MOEPACK = (sys.executable, "-m", "moepack")


def on_terminal(*command: str, **environment: str) -> str:
    """Run a command on a terminal of its own; return all that it wrote there."""
    ours, theirs = pty.openpty()
    names = os.environ | {"TERM": "xterm", "COLUMNS": "80"} | environment
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=names) as run:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 1 << 16):
                written += piece
        except OSError:  # how Linux says that the other end was closed
            pass
        run.wait(60)
    os.close(ours)
    return written.decode()


@contextmanager
def streams_on_terminal(size: tuple[int, int] | None = None) -> Iterator[list[str]]:
    """Make this process's streams a terminal of some columns and rows, or of no known size.

    Yields a list that has all written text when the block has ended.
    """
    ours, theirs = pty.openpty()
    if size is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", size[1], size[0], 0, 0))
    pieces: list[bytes] = []
    text: list[str] = []

    def read() -> None:
        with suppress(OSError):  # Linux's sign that the other end was closed
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)

    reader = Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield text
    finally:
        reader.join()
        os.close(ours)
        text.append(b"".join(pieces).decode())


class Terminal:
    """A command on a terminal of its own, for typing; `written` is its unread text.

    Its Ctrl-C comes from the terminal, too.
    """

    def __init__(self, *command: str, columns: int = 80, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        names = os.environ | {"TERM": "xterm"} | environment
        names.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            # By setsid the terminal, where the shell opens it, becomes the session's own.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=names,
        )
        os.close(theirs)
        self.written = ""

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for words after those that were waited for before; return all up to them."""
        deadline = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self.written)) is None:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, self.written
            try:
                piece = os.read(self._ours, 1 << 16)
            except OSError:  # how Linux says that the other end was closed
                raise AssertionError(self.written) from None
            self.written += piece.decode(errors="replace")
        head, self.written = self.written[: match.end()], self.written[match.end() :]
        return head

    @property
    def is_as_usual(self) -> bool:
        """Whether it shows what is typed, and gives whole lines, as a shell expects it."""
        modes = termios.tcgetattr(self._ours)[3]
        return bool(modes & termios.ECHO) and bool(modes & termios.ICANON)

    def close(self) -> None:
        """End the command, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def plain(text: str) -> str:
    """Return a terminal's text without its control sequences."""
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[78])", "", text)
