"""An answer as it is printed: a bar while its prompt is computed, the text, and what it took."""

from __future__ import annotations

import shutil
import sys
import textwrap
from itertools import chain
from typing import TYPE_CHECKING

from moepack.cli.live_line import live_line
from moepack.cli.terminal import is_quiet, pass_on, say
from moepack.cli.watched_progress import watched_progress

if TYPE_CHECKING:
    from moepack.programs.run_facts import MeasuredAnswer


def print_answer(answer: MeasuredAnswer, *, has_stats: bool) -> None:
    """Print a text as it comes, and what it took."""
    from moepack.report import run_text

    pieces = iter(answer)
    with watched_progress("prompt", "tokens", lambda: answer.prompt_progress):
        first = next(pieces, "")
    with live_line(is_wanted=has_stats) as draw:
        try:
            for piece in chain([first], pieces):
                pass_on([piece])
                sys.stdout.flush()
                draw(lambda: run_text.so_far(answer.so_far))
        finally:
            say()
    if not is_quiet() and answer.has_begun:
        lines = run_text.generated(answer.facts).splitlines()
        say("\n".join(map(_wrapped, lines)) if sys.stderr.isatty() else "\n".join(lines), err=True)


def _wrapped(line: str) -> str:
    """Break a line between words where the terminal would do so within one."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False)
