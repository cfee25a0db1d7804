"""Commands on terminals: real ones, of the system."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from threading import Thread
from typing import Self

from tests.support.children import PATIENCE


def on_terminal(*command: str, **environment: str) -> str:
    """Run a command on a terminal of its own; return all that it wrote there."""
    with Terminal(*command, **environment) as terminal:
        return terminal.until_end()


@contextmanager
def streams_on_terminal(size: tuple[int, int] | None = None) -> Iterator[list[str]]:
    """Make this process's streams a terminal of some columns and rows, or of no known size.

    Yields a list that has all written text when the block has ended.
    """
    ours, theirs = pty.openpty()
    if size is not None:
        _resize(ours, *size)
    text: list[str] = []
    reader = Thread(target=lambda: text.append(_read_all(ours)))
    reader.start()
    try:
        with open(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield text
    finally:
        reader.join()
        os.close(ours)


def _resize(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def _read_all(descriptor: int) -> str:
    """Read until the other end is closed, which Linux says with an error."""
    written = b""
    with suppress(OSError):
        while piece := os.read(descriptor, 1 << 16):
            written += piece
    return written.decode()


class Terminal:
    """A command on a terminal of its own, for typing; `written` is its unread text.

    Its Ctrl-C comes from the terminal, too. A context manager, which ends it.
    """

    def __init__(self, *command: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(80, 24)
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

    def resize(self, columns: int, rows: int) -> None:
        """Give it another size, as who pulls at a window's corner."""
        _resize(self._ours, columns, rows)

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

    def until_end(self) -> str:
        """Wait until the command has ended; return all that it wrote and nobody read."""
        written = self.written + _read_all(self._ours)
        self.process.wait(PATIENCE)
        return written

    @property
    def is_as_usual(self) -> bool:
        """Whether it shows what is typed, and gives whole lines, as a shell expects it."""
        modes = termios.tcgetattr(self._ours)[3]
        return bool(modes & termios.ECHO) and bool(modes & termios.ICANON)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def plain(text: str) -> str:
    """Return a terminal's text without its control sequences."""
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[78])", "", text)
