"""A chat: what is said is answered or obeyed, and what an error or a Ctrl-C leaves of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from moepack.cli import slash_commands
from moepack.cli.answering import print_answer
from moepack.cli.chat_input import PipedLines, Said, read_said
from moepack.cli.exit_codes import ExitCode, report
from moepack.cli.terminal import is_quiet, say
from moepack.cli.watched_progress import elapsed, watched_progress
from moepack.errors import MoepackError, RequestError
from moepack.programs.cancellation import Cancellation

if TYPE_CHECKING:
    from moepack.cli.line_editor import LineEditor
    from moepack.programs.answer import Answer
    from moepack.programs.chat import Conversation
    from moepack.programs.model_server import ModelServer

_WELCOME = "Ctrl-C ends an answer, Ctrl-D the chat; /help says what else there is"

Ask = Callable[[Cancellation], AbstractContextManager["Answer"]]


def make_editor() -> LineEditor | None:
    """Return what reads a chat from a terminal, None where there is none."""
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return None
    from moepack.cli.line_editor import LineEditor

    return LineEditor(sys.stdout if sys.stdout.isatty() else sys.stderr)


def chat(
    conversation: Conversation,
    server: ModelServer,
    editor: LineEditor | None,
    *,
    has_stats: bool,
) -> None:
    """Answer what is said, until there is no more.

    An error ends the answer, and not the chat: the next one may find the drive well again, or needs
    other experts. Without its server the chat ends, with that error's exit code. Where no `editor`
    reads from a terminal, the first error's code is the exit code, and an interruption ends it all.
    """
    talk = _Chat(conversation, server, is_terminal=editor is not None, has_stats=has_stats)
    if editor is None:
        talk.go_on(PipedLines())
        raise SystemExit(talk.exit_code)
    editor.on_reading = talk.renew
    talk.tell(_WELCOME)
    with _interruptions(editor, talk):
        talk.go_on(editor)


class _Chat:
    def __init__(
        self,
        conversation: Conversation,
        server: ModelServer,
        *,
        is_terminal: bool,
        has_stats: bool,
    ) -> None:
        self._conversation, self._server = conversation, server
        self._is_terminal, self._has_stats = is_terminal, has_stats
        self.cancellation = Cancellation()
        self._is_ending = False
        self.exit_code: int = ExitCode.FINE

    def go_on(self, source: Any) -> None:
        """Answer and obey until there is no more, or somebody leaves."""
        for said in read_said(source, is_terminal=self._is_terminal):
            try:
                command = None if said.is_quoted else slash_commands.parse(said.text)
                if command is not None and command.name == slash_commands.BYE:
                    return
                if command is None:
                    self._answer(said)
                else:
                    self._obey(command)
            except MoepackError as error:
                code = report(error)
                self.exit_code = self.exit_code or code
                if not self._server.is_running:
                    raise SystemExit(code) from None

    def renew(self) -> None:
        """Have the next answer be cancelled by itself."""
        self._is_ending = self._is_ending or self.cancellation.is_cancelled
        self.cancellation = Cancellation()

    def tell(self, text: str) -> None:
        """Say something to who sits at the terminal."""
        if self._is_terminal and not is_quiet():
            say(text, err=True)

    def _obey(self, command: slash_commands.SlashCommand) -> None:
        match command.name:
            case slash_commands.HELP:
                say(slash_commands.HELP_TEXT, err=True)
            case slash_commands.AGAIN:
                self._print(self._conversation.ask_again)
            case slash_commands.SYSTEM:
                self._instruct(command.text)
            case slash_commands.CLEAR:
                self._conversation.clear()
                self.tell("what was said is forgotten")
            case slash_commands.STATS:
                self._has_stats = not self._has_stats
                self.tell(f"stats are {'on' if self._has_stats else 'off'}")

    def _instruct(self, text: str) -> None:
        if not text:
            told = self._conversation.system
            say("the model is told nothing before all else" if told is None else told, err=True)
            return
        is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
        self._conversation.system = (text.strip('"') if is_quoted else text) or None
        self.tell(
            f"from the next answer on; what was said stays (/{slash_commands.CLEAR} forgets it)"
        )

    def _answer(self, said: Said) -> None:
        try:
            self._print(lambda cancellation: self._conversation.ask(said.text, cancellation))
        except RequestError as error:
            if self._conversation.has_past:  # the context is full
                error.add_note(f"/{slash_commands.CLEAR} forgets what was said so far")
            raise

    def _print(self, ask: Ask) -> None:
        from moepack.programs.run_facts import measure

        cancellation = self.cancellation
        with ExitStack() as stack:
            with self._ending():
                answer = stack.enter_context(measure(self._server, lambda: ask(cancellation)))
            print_answer(answer, has_stats=self._has_stats)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Show what is waited for: the server computes an answer that is left a while longer."""
        if not self._is_ending:
            yield
            return
        with watched_progress("ending the answer before", "s", elapsed()):
            yield
        self._is_ending = False


@contextmanager
def _interruptions(editor: LineEditor, talk: _Chat) -> Iterator[None]:
    """Have Ctrl-C end what is typed, or else the answer; it raises nothing, wherever it comes."""

    def interrupted(_signal: int, _frame: object) -> None:
        if not editor.interrupt():
            talk.cancellation.cancel()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
