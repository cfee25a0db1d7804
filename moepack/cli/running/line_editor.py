"""An editor for lines typed at a terminal, with a history, and pasted lines as one text."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import create_app_session, get_app_or_none
from prompt_toolkit.data_structures import Size
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

_USUAL_SIZE = Size(rows=24, columns=80)
"""The size of terminals that do not know theirs."""


class LineEditor:
    """Reads from the terminal of standard input, and echoes on `stream`."""

    def __init__(self, stream: TextIO) -> None:
        os.environ.setdefault("TERM", "dumb")
        is_dumb = is_dumb_terminal()
        self._output: Output = PlainTextOutput(stream) if is_dumb else _output(stream)
        self._history = InMemoryHistory()
        self._is_reading = self._is_interrupted = False
        self.on_reading: Callable[[], None] = lambda: None
        """Called at the begin of a line: from then on interruptions are its own."""

    def read(self, prompt: str) -> str:
        """Return a typed text. Raises EOFError at the end, and KeyboardInterrupt."""
        self._is_interrupted, self._is_reading = False, True
        self.on_reading()
        try:
            with create_app_session(output=self._output):
                session: PromptSession[str] = PromptSession(
                    history=self._history, enable_suspend=True
                )
                text = session.prompt(prompt, handle_sigint=False, pre_run=self._leave)
        finally:
            self._is_reading = False
        if self._is_interrupted:  # after the line was entered
            raise KeyboardInterrupt
        return text

    def interrupt(self) -> bool:
        """Interrupt the line that is being read; return whether there is one.

        A signal's handler may call it at any moment.
        """
        if not self._is_reading:
            return False
        self._is_interrupted = True
        app = get_app_or_none()
        if app is not None and app.loop is not None:
            app.loop.call_soon_threadsafe(self._leave)
        return True

    def _leave(self) -> None:
        app = get_app_or_none()
        if self._is_interrupted and app is not None and app.future and not app.future.done():
            app.exit(exception=KeyboardInterrupt)


def _output(stream: TextIO) -> Vt100_Output:
    """Return an output that never asks for the cursor's position: some terminals do not answer."""

    def size() -> Size:
        columns, rows = os.get_terminal_size(stream.fileno())
        return Size(rows, columns) if rows and columns else _USUAL_SIZE

    term = os.environ["TERM"]
    depth = ColorDepth.MONOCHROME  # else it greys interrupted lines, even with NO_COLOR
    return Vt100_Output(stream, size, term=term, default_color_depth=depth, enable_cpr=False)
