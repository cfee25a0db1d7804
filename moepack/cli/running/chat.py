"""A chat: messages are answered, commands obeyed, and errors and Ctrl-C end an answer alone."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from moepack.cli.running.answers import print_answer
from moepack.cli.shared.exit_codes import ExitCode, TerminatedError, report
from moepack.cli.shared.terminal import is_quiet, say
from moepack.common.errors import MoepackError, RequestError
from moepack.running.serving.client import Cancellation

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from moepack.cli.running.line_editor import LineEditor
    from moepack.running.serving.chat import Conversation
    from moepack.running.serving.client import Answer
    from moepack.running.serving.model_server import ModelServer

_QUOTES = '"""'
_WELCOME = "Ctrl-C ends an answer, Ctrl-D the chat; /help lists the other commands"
_HOW_TO_LEAVE = "Ctrl-D or /bye ends the chat"
_NAMES = ("help", "regen", "system", "clear", "stats", "bye")
_OTHER_NAMES = {"?": "help", "exit": "bye"}
"""Names in ollama and llama.cpp."""
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?\Z", re.DOTALL)
"""A path, which has another slash, is a message like any other."""
_HELP = f"""\
/regen          answer the last message again, with another seed
/system [TEXT]  show or change the system prompt
/clear          forget the conversation
/stats          show speed and reads during answers, or stop that
/bye            end the chat, as Ctrl-D does
{_QUOTES}             begin and end a message of several lines
Ctrl-C          end an answer

Lines that are pasted together are one message."""


def parse_command(line: str) -> tuple[str, str] | None:
    """Return the command in a line, and the text behind it; None in a message for the model.

    Several lines are a message, except for the text of /system. Raises RequestError for an unknown
    command.
    """
    match = _COMMAND.match(line.strip())
    if match is None:
        return None
    word, text = match[1].lower(), (match[2] or "").strip()
    name = _OTHER_NAMES.get(word, word)
    if "\n" in line.strip() and name != "system":
        return None
    if name not in _NAMES:
        names = " ".join(f"/{name}" for name in _NAMES)
        hint = f"there are {names}; text between {_QUOTES} is no command"
        raise RequestError(f"not a chat command: /{match[1]}", hint=hint)
    if text and name != "system":
        raise RequestError(f"/{name} takes no argument", found=text.splitlines()[0])
    return name, text


_Read = Callable[[str], str]
"""Returns a text, mostly a line, behind a prompt. Raises EOFError at the end."""


def _read_piped(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def make_editor() -> LineEditor | None:
    """Return an editor for the lines of a chat; None without a terminal."""
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return None
    from moepack.cli.running.line_editor import LineEditor

    return LineEditor(sys.stdout if sys.stdout.isatty() else sys.stderr)


def chat(
    conversation: Conversation, server: ModelServer, editor: LineEditor | None, *, has_stats: bool
) -> None:
    """Answer messages until there are no more.

    An error ends the answer, and not the chat: the next one may find the drive well again, or needs
    other experts. Without its server the chat ends, with that error's exit code. Without an
    `editor` the first error's code is the exit code, and an interruption ends it all.
    """
    talk = _Chat(conversation, server, editor is not None, has_stats)
    if editor is None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        talk.go_on(_read_piped)
        raise SystemExit(talk.exit_code)
    editor.on_reading = talk.renew
    talk.note(_WELCOME)

    def interrupt(_signal: int, _frame: object) -> None:
        # It ends the line that is typed, or else the answer, and raises nothing, whenever it comes.
        if not editor.interrupt():
            talk.cancellation.cancel()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        talk.go_on(editor.read)
    finally:
        signal.signal(signal.SIGINT, before)


class _Chat:
    def __init__(
        self, conversation: Conversation, server: ModelServer, is_terminal: bool, has_stats: bool
    ) -> None:
        self._conversation, self._server = conversation, server
        self._is_terminal, self._has_stats = is_terminal, has_stats
        self.cancellation = Cancellation()
        self.exit_code: int = ExitCode.FINE

    def go_on(self, read: _Read) -> None:
        """Answer and obey until the input or the chat ends."""
        for text, is_quoted in self._messages(read):
            try:
                command = None if is_quoted else parse_command(text)
                if command is None:
                    self._answer(text)
                elif command[0] == "bye":
                    return
                else:
                    self._obey(*command)
            except MoepackError as error:
                code = report(error)
                self.exit_code = self.exit_code or code
                if not self._server.is_running:
                    raise SystemExit(code) from None

    def _messages(self, read: _Read) -> Iterator[tuple[str, bool]]:
        """Yield the messages, and whether they stood between quotes.

        At a terminal an interruption clears the message that is typed.
        """
        while True:
            try:
                text = read("> ")
                is_quoted = text.lstrip().startswith(_QUOTES)
                if is_quoted:
                    text = _read_quoted(read, text.lstrip().removeprefix(_QUOTES))
            except EOFError:
                return
            except KeyboardInterrupt as stop:
                if isinstance(stop, TerminatedError) or not self._is_terminal:
                    raise
                say(_HOW_TO_LEAVE, err=True)
                continue
            if text.strip():
                yield text, is_quoted

    def renew(self) -> None:
        """Prepare a cancellation for the next answer."""
        self.cancellation = Cancellation()

    def note(self, text: str) -> None:
        """Print a text on the terminal of a chat that is not quiet."""
        if self._is_terminal and not is_quiet():
            say(text, err=True)

    def _obey(self, name: str, text: str) -> None:
        match name:
            case "help":
                say(_HELP, err=True)
            case "regen":
                self._print(self._conversation.ask_again)
            case "system":
                self._show_or_set_system(text)
            case "clear":
                self._conversation.clear()
                self.note("the conversation is forgotten")
            case "stats":
                self._has_stats = not self._has_stats
                self.note(f"stats are {'on' if self._has_stats else 'off'}")

    def _show_or_set_system(self, text: str) -> None:
        if not text:
            system = self._conversation.system
            say("there is no system prompt" if system is None else system, err=True)
            return
        if self._conversation.is_raw:
            raise RequestError("a system prompt needs a template", hint="--chat-template chatml")
        self._conversation.system = _unquote(text) or None
        self.note("from the next answer on; the conversation stays (/clear forgets it)")

    def _answer(self, text: str) -> None:
        try:
            self._print(partial(self._conversation.ask, text))
        except RequestError as error:
            if self._conversation.has_past:  # the context is full
                error.add_note("/clear forgets the conversation")
            raise

    def _print(self, ask: Callable[[Cancellation], AbstractContextManager[Answer]]) -> None:
        asking = partial(ask, self.cancellation)
        print_answer(self._server, asking, has_stats=self._has_stats)


def _unquote(text: str) -> str:
    """Return the text between quotes, if they are one pair around all of it; else as it is."""
    for quotes in (_QUOTES, '"'):
        inside = text.removeprefix(quotes).removesuffix(quotes)
        if text == f"{quotes}{inside}{quotes}" and quotes not in inside:
            return inside
    return text


def _read_quoted(read: _Read, text: str) -> str:
    """Read on until quotes end a line, or the input ends; return the text between them."""
    while not text.rstrip().endswith(_QUOTES):
        try:
            text += "\n" + read(". ")
        except EOFError:
            break
    return text.rstrip().removesuffix(_QUOTES).strip("\n")
