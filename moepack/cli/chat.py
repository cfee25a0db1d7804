"""A chat in the terminal: what was said, and what an error or a Ctrl-C leaves of it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moepack.cli.exit_codes import ExitCode, TerminatedError, report
from moepack.cli.live_line import live_line
from moepack.cli.terminal import complain, is_quiet, pass_on, say
from moepack.errors import MoepackError, RequestError

if TYPE_CHECKING:
    from moepack.running.chat import Message
    from moepack.running.generation import Generation
    from moepack.running.model import Model

CLEAR = "/clear"
_WELCOME = f"Ctrl-C ends an answer, {CLEAR} begins anew, Ctrl-D ends the chat"


class Conversation:
    """What was said to a model, and what it answered."""

    def __init__(self, model: Model, system: str | None, **options: Any) -> None:
        self._model = model
        self._options = options
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forget all but what the model is told before all else."""
        self._messages: list[Message] = []
        if self._system is not None:
            self._say("system", self._system)
        self._start = len(self._messages)

    @property
    def has_past(self) -> bool:
        """Whether anything is left of what was said."""
        return len(self._messages) > self._start

    @contextlib.contextmanager
    def ask(self, text: str) -> Iterator[Generation]:
        """Say something, and have it answered; what was answered until this is left is kept.

        Where nothing was, what was said is forgotten as well. Raises what `Model.chat` raises.
        """
        said = len(self._messages)
        self._say("user", text)
        answer = ""
        try:
            generation = self._model.chat(self._messages, **self._options)
            try:
                yield generation
            finally:
                answer = generation.text
        finally:
            if answer:
                self._say("assistant", answer)
            else:
                del self._messages[said:]

    def _say(self, role: str, text: str) -> None:
        from moepack.running.chat import Message

        self._messages.append(Message(role, text))


def chat(conversation: Conversation, has_stats: bool) -> None:
    """Answer line by line, until there are no more or somebody interrupts at the prompt.

    An error ends the answer, and not the chat: the next one may find the drive well again, or needs
    other experts. Where the lines come from no terminal, the first error's code is the exit code.
    """
    is_terminal = sys.stdin.isatty()
    code: int = ExitCode.FINE
    if is_terminal and not is_quiet():
        say(_WELCOME, err=True)
    for line in _lines(is_terminal):
        if line.strip() == CLEAR:
            conversation.clear()
            continue
        try:
            with conversation.ask(line) as generation:
                print_text(generation, has_stats)
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


def print_text(generation: Generation, has_stats: bool) -> None:
    """Print a text as it comes, and what it took."""
    from moepack.report import run_text

    with live_line(is_wanted=has_stats) as draw:
        try:
            for piece in generation:
                pass_on([piece])
                sys.stdout.flush()
                draw(lambda: run_text.so_far(generation.so_far))
        except MoepackError:
            if generation.text:
                say()
            raise
        say()
    if not is_quiet():
        say(run_text.generated(generation.facts), err=True)
