"""A chat in the terminal, and what an error or a Ctrl-C leaves of it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from moepack.cli.exit_codes import ExitCode, TerminatedError, report
from moepack.cli.live_line import live_line
from moepack.cli.terminal import complain, is_quiet, pass_on, say
from moepack.errors import MoepackError, RequestError

if TYPE_CHECKING:
    from moepack.programs.chat import Conversation
    from moepack.programs.model_server import ModelServer
    from moepack.programs.run_facts import MeasuredAnswer

CLEAR = "/clear"
_WELCOME = f"Ctrl-C ends an answer, {CLEAR} begins anew, Ctrl-D ends the chat"


def chat(conversation: Conversation, server: ModelServer, has_stats: bool) -> None:
    """Answer line by line, until there are no more or somebody interrupts at the prompt.

    An error ends the answer, and not the chat: the next one may find the drive well again, or needs
    other experts. Where the lines come from no terminal, the first error's code is the exit code.
    """
    from moepack.programs.run_facts import measure

    is_terminal = sys.stdin.isatty()
    code: int = ExitCode.FINE
    if is_terminal and not is_quiet():
        say(_WELCOME, err=True)
    for line in _lines(is_terminal):
        if line.strip() == CLEAR:
            conversation.clear()
            continue
        try:
            with measure(server, partial(conversation.ask, line)) as answer:
                print_text(answer, has_stats)
        except KeyboardInterrupt as stop:
            if isinstance(stop, TerminatedError) or not is_terminal:
                raise
            say()
        except MoepackError as error:
            reported = report(error)
            code = code or reported
            if conversation.has_past and isinstance(error, RequestError):  # the context is full
                complain("hint", f"{CLEAR} forgets what was said so far")
    if not is_terminal:
        raise SystemExit(code)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield what is said, until there is no more or somebody interrupts."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # whose import lets `input` edit lines
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt) as end:
            if isinstance(end, TerminatedError):
                raise
            if is_terminal:
                say()
            elif isinstance(end, KeyboardInterrupt):
                raise
            return
        if line.strip():
            yield line


def print_text(answer: MeasuredAnswer, has_stats: bool) -> None:
    """Print a text as it comes, and what it took."""
    from moepack.report import run_text

    has_begun = False
    with live_line(is_wanted=has_stats) as draw:
        try:
            for piece in answer:
                has_begun = True
                pass_on([piece])
                sys.stdout.flush()
                draw(lambda: run_text.so_far(answer.so_far))
        except MoepackError:
            if has_begun:
                say()
            raise
        say()
    if not is_quiet():
        say(run_text.generated(answer.facts), err=True)
