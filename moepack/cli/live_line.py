"""How things stand while text goes on: in the last row of a terminal, elsewhere now and then."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator

from moepack.cli.progress import is_terminal
from moepack.cli.terminal import draw as put
from moepack.cli.terminal import say

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.5
_FEWEST_ROWS = 4

Draw = Callable[[Callable[[], str]], None]
"""Draws what a function says, where it is time to."""


@contextlib.contextmanager
def live_line(*, is_wanted: bool) -> Iterator[Draw]:
    """Give what draws the line; it asks for the text only when it is time to draw.

    A terminal keeps its last row for it: what is printed meanwhile scrolls above it.
    """
    rows = shutil.get_terminal_size().lines
    if not is_wanted:
        yield lambda text: None
    elif is_terminal() and rows >= _FEWEST_ROWS:
        # A new line, so that the cursor is not in the row that is taken away.
        put(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[A")
        try:
            yield _every(_SECONDS_BETWEEN_FRAMES, lambda text: put(_in_row(rows, text)))
        finally:
            put(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")
    else:
        yield _every(_SECONDS_BETWEEN_LINES, lambda text: say(text, err=True))


def _every(seconds: float, draw: Callable[[str], None]) -> Draw:
    drawn = time.monotonic()

    def draw_in_time(text: Callable[[], str]) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= seconds:
            drawn = now
            draw(text())

    return draw_in_time


def _in_row(row: int, text: str) -> str:
    """Return what writes a text to a row and leaves the cursor where it was."""
    width = shutil.get_terminal_size().columns - 1
    return f"\x1b7\x1b[{row};1H\x1b[2K{text[:width]}\x1b8"
