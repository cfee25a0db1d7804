"""Progress that nobody reports: it is looked at while something else is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from moepack.cli.progress import Progress, progress

_SECONDS_BETWEEN = 0.1

State = Callable[[], tuple[int, int | None] | None]
"""Returns how much is done, and of how much where that is known; None before anything is."""


@contextlib.contextmanager
def watched_progress(what: str, unit: str, state: State) -> Iterator[None]:
    """Show progress until this is left. `state` is called in another thread; else as `progress`."""
    with progress(None, what, unit, has_summary=False) as advance:
        if advance is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=_watch, args=(state, advance, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def elapsed() -> State:
    """Return a state that is only how many seconds went by."""
    began = time.monotonic()
    return lambda: (round(time.monotonic() - began), None)


def _watch(state: State, advance: Progress, ended: threading.Event) -> None:
    shown = 0
    while not ended.wait(_SECONDS_BETWEEN):
        if (now := state()) is not None:
            count, total = now
            advance(max(0, count - shown), total)
            shown = max(shown, count)
