"""The work that a reader has to end before its files close, in its own process alone.

A finaliser runs anywhere: in the midst of another call that holds a lock, or in a thread that
reads; and Python swallows a Ctrl-C that comes in it. So a finaliser here waits for nothing and
takes no lock. It puts the dropped work on a list, and the next call closes it.

A forked child has a copy of the reader but shares its rings with the parent, and has none of its
threads. There every call is refused, and closing does nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from moepack.common.closing import Closing
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moepack.pack.reading.in_flight import InFlight
    from moepack.storage.backend import Backend

_AnyWork = TypeVar("_AnyWork", bound=Closing)


class OpenWork(Closing):
    """All work that one reader has to end: reads that were begun together.

    Their `close` drops those that have not begun, and waits for the others; it may be called again
    if it was cut off.
    """

    def __init__(self, in_flight: InFlight, backend: Backend) -> None:
        self._process = os.getpid()
        self._in_flight = in_flight
        self._backend = backend
        self._works: set[Closing] = set()
        self._dropped: deque[Closing] = deque()
        self._is_over = False
        self._lock = threading.RLock()
        self._closing = threading.RLock()

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return os.getpid() != self._process

    def enter(self) -> None:
        """Begin a call: close dropped work. Raises RequestError if the reader is closed."""
        self.close_dropped()
        self.check_open()

    def check_open(self) -> None:
        """Raise RequestError if the reader is closed."""
        if self._in_flight.is_closed:
            raise RequestError("the reader is closed")

    def close_dropped(self) -> None:
        """Close the work that was dropped. Raises RequestError in a forked child."""
        if self.is_forked:
            problem = "the reader belongs to the process that this one was forked from"
            raise RequestError(problem, hint="open the pack again in the child")
        if self._dropped or _orphans:  # mostly not, and this is asked for every expert
            for work in _left(self._dropped):
                work.close()
                self.release(work)
            close_orphans()

    def adopt(self, work: Closing) -> None:
        """Let `close` end `work` too. Raises RequestError if the reader is closed."""
        with self._lock:
            self.check_open()
            self._works.add(work)

    def release(self, work: Closing) -> None:
        """Forget `work`, which has ended."""
        with self._lock:
            self._works.discard(work)

    def drop(self, work: Closing) -> None:
        """Leave `work` for the next call to close; for finalisers."""
        self._dropped.append(work)

    def close(self) -> None:
        """End all work, let nothing begin any more, and close the backend.

        May be called again if it was cut off.
        """
        if self.is_forked:
            return
        with self._closing:
            with self._lock:
                self._in_flight.close()
                works = list(self._works)
            for work in works:
                work.close()
                self.release(work)
            self._dropped.clear()
            # Of an interrupted read; this thread reads nothing now.
            self._in_flight.forget(threading.get_ident())
            self._in_flight.drain()
            if not self._is_over:
                self._backend.close()
                self._is_over = True

    def abandon(self) -> None:
        """End all of a reader that was dropped: now, if there is nothing to wait for."""
        if self._in_flight.is_empty:
            self.close()
        else:
            _orphans.append(self)


_orphans: deque[OpenWork] = deque()
"""The work of readers that were dropped while reads were in flight."""


def close_orphans() -> None:
    """Close the work of dropped readers."""
    for orphan in _left(_orphans):
        orphan.close()


def _left(works: deque[_AnyWork]) -> Iterator[_AnyWork]:
    """Yield the work on a list, and remove it after it was closed: not if a Ctrl-C came first.

    Several threads may do so at a time.
    """
    while True:
        try:
            work = works[0]
        except IndexError:
            return
        yield work
        with contextlib.suppress(ValueError):  # another thread was faster
            works.remove(work)
