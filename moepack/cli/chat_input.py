"""What is said in a chat: at a terminal, or in lines from a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from moepack.cli.exit_codes import TerminatedError
from moepack.cli.slash_commands import QUOTES
from moepack.cli.terminal import say

_PROMPT, _CONTINUED = "> ", ". "
_HOW_TO_LEAVE = "Ctrl-D or /bye ends the chat"


class Said(NamedTuple):
    """A text that somebody said; between quotes it `is_quoted`, and no command."""

    text: str
    is_quoted: bool


class Input(Protocol):
    """Gives texts, mostly lines."""

    def read(self, prompt: str) -> str:
        """Return a text. Raises EOFError at the end."""


class PipedLines:
    """The lines of standard input."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def read(self, prompt: str) -> str:
        """Return a line. Raises EOFError at the end."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def read_said(source: Input, *, is_terminal: bool) -> Iterator[Said]:
    """Yield what is said, until there is no more.

    At a terminal an interruption forgets what was typed of a message, and how to leave is said.
    """
    while True:
        try:
            said = _read_message(source)
        except EOFError:
            return
        except KeyboardInterrupt as stop:
            if isinstance(stop, TerminatedError) or not is_terminal:
                raise
            say(_HOW_TO_LEAVE, err=True)
            continue
        if said.text.strip():
            yield said


def _read_message(source: Input) -> Said:
    text = source.read(_PROMPT)
    if text.lstrip().startswith(QUOTES):
        return Said(_quoted(source, text.lstrip().removeprefix(QUOTES)), is_quoted=True)
    return Said(text, is_quoted=False)


def _quoted(source: Input, text: str) -> str:
    """Read on until quotes end a line, or there is no more; return what stands between."""
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + source.read(_CONTINUED)
        except EOFError:
            break
    return text.rstrip().removesuffix(QUOTES).strip("\n")
