"""Progress of long work: a bar on a terminal, elsewhere a line now and then, or JSON."""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from moepack.cli.shared.terminal import (
    draw,
    is_json_log,
    is_json_progress,
    is_quiet,
    is_verbose,
    say,
)
from moepack.common.sizes import count_text, size_text
from moepack.report.values import rate_text, seconds_text, speed_text

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_OBJECTS = 1.0
_SECONDS_BEFORE_BAR = 0.3
_SECONDS_BETWEEN_POLLS = 0.1
_SECONDS_BETWEEN_FRAMES = 0.1


State = Callable[[], tuple[int, int | None] | None]
"""Returns the amount done, and the total or None if unknown; None before the work begins."""


@contextlib.contextmanager
def progress(
    what: str, unit: str = "B", *, has_summary: bool = True
) -> Iterator["ProgressLines | None"]:
    """Show progress on standard error, and with -v a summary.

    `unit` is B, ms, s, or a plural noun. Yields None for commands that are quiet or log JSON,
    unless their progress is to be JSON.
    """
    if is_json_progress():
        shown: ProgressLines = _JsonLines(what, unit)
    elif is_quiet() or is_json_log():
        yield None
        return
    else:
        shown = (_Bar if is_terminal() else ProgressLines)(what, unit)
    try:
        yield shown
        shown.succeed()
    finally:
        shown.close()
    if has_summary and is_verbose():
        say(shown.summary(), err=True)


def is_terminal() -> bool:
    """Return whether standard error is a terminal that can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def watched_progress(what: str, unit: str, state: State | None = None) -> Iterator[None]:
    """Show the progress of work that reports none: `state` is polled in a thread.

    Without `state` it is the seconds that went by.
    """
    began = time.monotonic()
    polled = state or (lambda: (round(time.monotonic() - began), None))
    with progress(what, unit, has_summary=False) as advance:
        if advance is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=_poll, args=(polled, advance, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _poll(state: State, advance: "ProgressLines", ended: threading.Event) -> None:
    shown = 0
    while not ended.wait(_SECONDS_BETWEEN_POLLS):
        if (now := state()) is not None:
            count, total = now
            advance(max(0, count - shown), total)
            shown = max(shown, count)


class ProgressLines:
    """Progress as lines that stay, for logs; call it with each amount done."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._count = 0
        self._total: int | None = None
        self._began = time.monotonic()
        self._next = self._began + _SECONDS_BETWEEN_LINES

    def __call__(self, count: int, total: int | None = None) -> None:
        """Add `count`, of a `total` if it is known by now."""
        self._count += count
        self._total = self._total if total is None else total
        self.show(count)

    def show(self, count: int) -> None:
        """Show the state after `count` more."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            say(f"{self._what} {self._state(now - self._began)}", err=True)

    def succeed(self) -> None:
        """Show that the work is done."""

    def close(self) -> None:
        """Erase everything that is not to stay."""

    def summary(self) -> str:
        """Return the amount, the time and the speed."""
        seconds = time.monotonic() - self._began
        text = f"{self._what}: {self._amount(self._count)} in {seconds_text(seconds)}"
        if self._unit == "B" and self._count and seconds > 0:
            text += f", {speed_text(self._count / seconds)}"
        return text

    def _state(self, seconds: float) -> str:
        """Return the amount done, the speed, and the time left at that speed."""
        if not self._total:
            return self._amount(self._count)
        share = min(self._count / self._total, 1.0)
        done, total = self._amount(self._count), self._amount(self._total)
        text = f"{int(100 * share):>3} %  {done} of {total}"
        if self._unit == "B" and self._count and seconds > 0:
            text += f"  {speed_text(self._count / seconds)}"
        if self._unit == "tokens" and seconds > 0:
            text += f"  {rate_text(self._count / seconds)} tok/s"
        if share > 0:
            text += f"  {_duration(seconds / share - seconds)} left"
        return text

    def _amount(self, count: int) -> str:
        if self._unit == "B":
            return size_text(count)
        if self._unit == "ms":
            return _duration(count / 1000)
        if self._unit == "s":
            return _duration(count)
        return count_text(count, self._unit.removesuffix("s"))


class _JsonLines(ProgressLines):
    """Progress as JSON objects for programs, one a line and a second, and a last one at the end."""

    def show(self, count: int) -> None:
        now = time.monotonic()
        if self._count == count or now >= self._next:
            self._next = now + _SECONDS_BETWEEN_OBJECTS
            self._print()

    def succeed(self) -> None:
        self._print(is_over=True)

    def _print(self, *, is_over: bool = False) -> None:
        facts = {
            "progress": self._what,
            "unit": "bytes" if self._unit == "B" else self._unit,
            "done": self._count,
            "total": self._total,
            "seconds": round(time.monotonic() - self._began, 3),
            "is_over": is_over,
        }
        say(json.dumps(facts), err=True)


class _Bar(ProgressLines):
    """The same line, drawn over and over behind a bar, and erased at the end."""

    _drawn = 0.0
    _width = 0

    def show(self, count: int) -> None:
        now = time.monotonic()
        is_early = now - self._began < _SECONDS_BEFORE_BAR
        if is_early or now - self._drawn < _SECONDS_BETWEEN_FRAMES:
            return
        self._drawn = now
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        self._width = (columns or shutil.get_terminal_size().columns) - 1
        state = self._state(now - self._began)
        line = f"{self._what} {self._bar(state)}{state}"
        draw("\r" + line[: self._width].ljust(self._width))

    def close(self) -> None:
        if self._width:
            draw("\r" + " " * self._width + "\r")

    def _bar(self, state: str) -> str:
        """Return a bar in the space that a state leaves; an empty one without a total."""
        length = self._width - len(f"{self._what} [] {state}")
        if not self._total or length < 1:
            return ""
        done = round(length * min(self._count / self._total, 1.0))
        return f"[{'#' * done}{'-' * (length - done)}] "


def _duration(seconds: float) -> str:
    """Return a time as on a clock: `0:42`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
