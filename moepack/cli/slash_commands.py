"""The commands of a chat: a line that begins with a slash and a word."""

from __future__ import annotations

import re
from typing import NamedTuple

from moepack.errors import RequestError

QUOTES = '"""'
"""What begins and ends a message of several lines."""

HELP = "help"
AGAIN = "regen"
SYSTEM = "system"
CLEAR = "clear"
STATS = "stats"
BYE = "bye"
_NAMES = (HELP, AGAIN, SYSTEM, CLEAR, STATS, BYE)
_OTHER_NAMES = {"?": HELP, "exit": BYE}
"""What others call them: ollama and llama.cpp."""
_WITH_TEXT = {SYSTEM}
_FORM = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?\Z", re.DOTALL)
"""A path, which has another slash, is a message like any other."""
_LIST = " ".join(f"/{name}" for name in _NAMES)

HELP_TEXT = f"""\
/regen          answer the last message again, with another seed
/system [TEXT]  show what the model is told before all else, or change it
/clear          forget what was said
/stats          show how fast it is and what is read, or stop that
/bye            end the chat, as Ctrl-D does
{QUOTES}             begin and end a message of several lines
Ctrl-C          end an answer

Lines that are pasted together are one message."""


class SlashCommand(NamedTuple):
    """A command by its name, and the text behind it."""

    name: str
    text: str


def parse(line: str) -> SlashCommand | None:
    """Return the command in a line, None in a message for the model.

    Several lines are a message, but for a text that a command takes. Raises RequestError for a
    command that there is none of.
    """
    match = _FORM.match(line.strip())
    if match is None:
        return None
    word, text = match[1].lower(), (match[2] or "").strip()
    name = _OTHER_NAMES.get(word, word)
    if "\n" in line.strip() and name not in _WITH_TEXT:
        return None
    if name not in _NAMES:
        raise RequestError(
            f"no command of a chat: /{match[1]}",
            hint=f"there are {_LIST}; text between {QUOTES} is no command",
        )
    if text and name not in _WITH_TEXT:
        raise RequestError(f"/{name} takes nothing behind it", found=text.splitlines()[0])
    return SlashCommand(name, text)
