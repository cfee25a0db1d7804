"""Progress of what takes long: a bar on a terminal, elsewhere a line now and then."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from moepack.cli.terminal import draw, is_quiet, is_verbose, say
from moepack.report.values import UNKNOWN
from moepack.sizes import size_text

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.1
_SHORTEST_BAR, _LONGEST_BAR = 8, 40


class Progress(Protocol):
    """A callback for what takes long."""

    def __call__(self, count: int, total: int | None = None) -> None:
        """Take `count` more as done, of `total` where that is known only now."""


@contextlib.contextmanager
def progress(total: int | None, what: str, unit: str = "B") -> Iterator[Progress | None]:
    """Show progress towards `total` on standard error, and how long it took where that is wanted.

    Without a `total` it is known when the first progress says it. `unit` is what is counted: B, ms,
    or a word for many of them. Yields None for quiet commands.
    """
    if is_quiet():
        yield None
        return
    shown = _Bar(total, what, unit) if is_terminal() else _Lines(total, what, unit)
    try:
        yield shown
    finally:
        shown.close()
    if is_verbose():
        say(shown.summary(), err=True)


def is_terminal() -> bool:
    """Say whether standard error is a terminal that can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Shown:
    """How much was done since when, and that as text."""

    interval: float
    """Seconds between two prints, at least."""

    def __init__(self, total: int | None, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self.count, self.total = 0, total
        self._began = time.monotonic()
        self._next = self._began + self.interval

    def __call__(self, count: int, total: int | None = None) -> None:
        self.count += count
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.interval
            self.draw()

    def draw(self) -> None:
        """Show where it stands."""
        raise NotImplementedError

    def close(self) -> None:
        """Take away what is not to stay."""

    @property
    def share(self) -> float | None:
        """How much of the total is done, from 0 to 1."""
        return min(self.count / self.total, 1.0) if self.total else None

    def state(self) -> str:
        """Return what is done, how fast, and how long the rest will take at that speed."""
        seconds = time.monotonic() - self._began
        share = self.share
        if share is None:
            return self._amount(self.count)
        text = f"{int(100 * share):>3} %  {self._amount(self.count)} of {self._amount(self.total)}"
        if self.unit == "B" and seconds > 0:
            text += f"  {size_text(round(self.count / seconds))}/s"
        if share > 0:
            text += f"  {_duration(seconds / share - seconds)} left"
        return text

    def summary(self) -> str:
        """Return what was done, in what time."""
        seconds = time.monotonic() - self._began
        text = f"{self.what}: {self._amount(self.count)} in {seconds:.1f} s"
        if self.unit == "B" and seconds > 0:
            text += f", {size_text(round(self.count / seconds))}/s"
        return text

    def _amount(self, count: int | None) -> str:
        if count is None:
            return UNKNOWN
        if self.unit == "B":
            return size_text(count)
        if self.unit == "ms":
            return _duration(count / 1000)
        return f"{count:,} {self.unit}".rstrip()


class _Lines(_Shown):
    """Lines that stay, for logs."""

    interval = _SECONDS_BETWEEN_LINES

    def draw(self) -> None:
        say(f"{self.what} {self.state()}", err=True)


class _Bar(_Shown):
    """A line that is drawn over and over, no wider than the terminal, and goes in the end."""

    interval = _SECONDS_BETWEEN_FRAMES

    def draw(self) -> None:
        text = self.state()
        width = shutil.get_terminal_size().columns - 1
        room = min(width - len(self.what) - len(text) - 4, _LONGEST_BAR)
        bar = ""
        if self.share is not None and room >= _SHORTEST_BAR:
            bar = f"[{'#' * int(room * self.share):<{room}}] "
        draw(f"\r{f'{self.what} {bar}{text}'[:width]}\x1b[K")

    def close(self) -> None:
        draw("\r\x1b[K")


def _duration(seconds: float) -> str:
    """Write a time as clocks do: `0:42`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
