"""Answers of a model, printed as they come, and a line of statistics in the terminal's last row."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import TYPE_CHECKING

from moepack.cli.shared.progress import is_terminal, watched_progress
from moepack.cli.shared.terminal import draw as put
from moepack.cli.shared.terminal import is_json, is_quiet, lay_out, pass_on, say, show

if TYPE_CHECKING:
    from moepack.running.serving.client import Answer
    from moepack.running.serving.model_server import ModelServer

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.5
_FEWEST_ROWS = 4

Draw = Callable[[Callable[[], str]], None]
"""Draws the text that a function returns, if it is time to."""


def print_answer(
    server: ModelServer, ask: Callable[[], AbstractContextManager[Answer]], *, has_stats: bool
) -> None:
    """Print an answer as it comes, and its statistics; or both as JSON at its end."""
    from moepack.report import measure_text
    from moepack.running.serving.run_facts import measure

    with ExitStack() as stack:
        answer = stack.enter_context(measure(server, ask))
        pieces = iter(answer)
        if is_json():
            deque(pieces, maxlen=0)
            show(answer.facts, measure_text.generated)
            return
        with watched_progress("prompt", "tokens", lambda: answer.prompt_progress):
            first = next(pieces, "")
        with live_line(is_wanted=has_stats) as draw:
            try:
                for piece in chain([first], pieces):
                    pass_on(piece)
                    sys.stdout.flush()
                    draw(lambda: measure_text.so_far(answer.so_far))
            finally:
                say()
        facts = answer.facts
        if facts.token_count and not is_quiet():
            lay_out(measure_text.generated(facts), err=True)


@contextlib.contextmanager
def live_line(*, is_wanted: bool) -> Iterator[Draw]:
    """Yield a function that draws the line; it calls for the text only when it is time to draw.

    A terminal keeps its last row for it: all other text scrolls above it.
    """
    rows = shutil.get_terminal_size().lines

    def put_in_row(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        put(f"\x1b7\x1b[{rows};1H\x1b[2K{text[:width]}\x1b8")

    if not is_wanted:
        yield lambda text: None
    elif is_terminal() and rows >= _FEWEST_ROWS:
        # A new line, so that the cursor is not in the row that is taken away.
        put(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[A")
        try:
            yield _every(_SECONDS_BETWEEN_FRAMES, put_in_row)
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
