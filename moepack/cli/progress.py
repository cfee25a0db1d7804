"""Progress of what takes long: a bar on a terminal, elsewhere a line now and then."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from moepack.cli.terminal import is_quiet, is_verbose, say
from moepack.report.values import rate_text, seconds_text, speed_text
from moepack.sizes import count_text, size_text

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BEFORE_BAR = 0.3
_BAR_UNITS: dict[str, dict[str, Any]] = {
    "B": {"unit": "iB", "unit_scale": True, "unit_divisor": 1024},
    "ms": {"bar_format": "{l_bar}{bar}| [{elapsed}<{remaining}]"},
    "s": {"bar_format": "{desc}: {elapsed}"},
    "tokens": {"unit": " tok", "smoothing": 0},  # which come in steps: the average tells most
}
"""How tqdm writes them; other units are words, and counted one by one."""


class Progress(Protocol):
    """A callback for what takes long."""

    def __call__(self, count: int, total: int | None = None) -> None:
        """Take `count` more as done, of `total` where that is known only now."""


@contextlib.contextmanager
def progress(
    total: int | None, what: str, unit: str = "B", *, has_summary: bool = True
) -> Iterator[Progress | None]:
    """Show progress towards `total` on standard error, and how long it took where that is wanted.

    Without a `total` it is known when the first progress says it. `unit` is what is counted: B, ms,
    s, or a word for many of them. Yields None for quiet commands.
    """
    if is_quiet():
        yield None
        return
    shown = _Bar(total, what, unit) if is_terminal() else _Lines(total, what, unit)
    try:
        yield shown
    finally:
        shown.close()
    if has_summary and is_verbose():
        say(shown.summary(), err=True)


def is_terminal() -> bool:
    """Say whether standard error is a terminal that can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Lines:
    """How much was done since when, in lines that stay, for logs."""

    def __init__(self, total: int | None, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._count, self._total = 0, total
        self._began = time.monotonic()
        self._next = self._began + _SECONDS_BETWEEN_LINES

    def __call__(self, count: int, total: int | None = None) -> None:
        self._count += count
        self._total = self._total if total is None else total
        self.show(count)

    def show(self, count: int) -> None:
        """Show where it stands, now that `count` more is done."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            say(f"{self._what} {self._state(now - self._began)}", err=True)

    def close(self) -> None:
        """Take away what is not to stay."""

    def summary(self) -> str:
        """Return what was done, in what time."""
        seconds = time.monotonic() - self._began
        text = f"{self._what}: {self._amount(self._count)} in {seconds_text(seconds)}"
        if self._unit == "B" and self._count and seconds > 0:
            text += f", {speed_text(self._count / seconds)}"
        return text

    def _state(self, seconds: float) -> str:
        """Return what is done, how fast, and how long the rest will take at that speed."""
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


class _Bar(_Lines):
    """A bar of tqdm's, which goes in the end."""

    _bar: Any = None
    _is_refreshed = False
    """Whether the bar was drawn without an update, which tqdm does not know when it ends."""

    def show(self, count: int) -> None:
        if self._bar is None:
            self._bar = self._begin()
        self._bar.total = self._total
        if count:
            self._bar.update(count)
        elif time.monotonic() - self._began >= _SECONDS_BEFORE_BAR:
            self._bar.refresh()  # an update by 0 would leave its time out of the speed
            self._is_refreshed = True

    def close(self) -> None:
        if self._bar is not None:
            if self._is_refreshed:
                self._bar.clear()
            self._bar.close()

    def _begin(self) -> Any:
        from threading import RLock

        from tqdm import tqdm  # here, since most commands draw no bar

        # Neither a thread that watches bars, nor a lock between processes: one thread draws.
        tqdm.monitor_interval = 0
        tqdm.set_lock(RLock())
        return tqdm(
            desc=self._what,
            leave=False,
            **_bar_size(),
            delay=_SECONDS_BEFORE_BAR,
            miniters=0,
            **_BAR_UNITS.get(self._unit, {"unit": self._unit.removesuffix("s")}),
        )


def _bar_size() -> dict[str, Any]:
    """Let tqdm follow the terminal's size; where it has none, tqdm would draw nothing."""
    columns, lines = os.get_terminal_size(sys.stderr.fileno())
    if columns and lines:
        return {"dynamic_ncols": True}
    columns, lines = shutil.get_terminal_size()
    return {"ncols": columns - 1, "nrows": lines}


def _duration(seconds: float) -> str:
    """Write a time as clocks do: `0:42`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
