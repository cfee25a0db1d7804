"""What a reader has begun and has to end: before its files close, and in its own process alone.

A finaliser runs anywhere: in the midst of another call that holds a lock, or in a thread that
reads; and Python swallows a Ctrl-C that comes in it. So a finaliser here waits for nothing and
takes no lock. It puts what was dropped on a list, and the next call closes what is there.

A forked child has a copy of the reader but shares its rings with the parent, and has none of its
threads. There every call is refused, and closing does nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

from moepack.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moepack.reading.budget import Budget
    from moepack.storage.backend import Backend

_AnyWork = TypeVar("_AnyWork", bound="Work")


class Work(Protocol):
    """Reads that were begun together."""

    def close(self) -> None:
        """Give up what has not begun and wait for the rest; once more where that was cut off."""
        ...


class OpenWork:
    """All that one reader has to end."""

    def __init__(self, budget: Budget, backend: Backend) -> None:
        self._process = os.getpid()
        self._budget = budget
        self._backend = backend
        self._works: set[Work] = set()
        self._dropped: deque[Work] = deque()
        self._is_over = False
        self._lock = threading.RLock()
        self._closing = threading.RLock()

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return os.getpid() != self._process

    def enter(self) -> None:
        """Begin a call: close what was dropped. Raises RequestError where the reader is closed."""
        self.close_dropped()
        self.check_open()

    def check_open(self) -> None:
        """Raise RequestError where the reader is closed."""
        if self._budget.is_closed:
            raise RequestError("the reader is closed")

    def close_dropped(self) -> None:
        """Close what finalisers have left. Raises RequestError in a forked child."""
        if os.getpid() != self._process:
            problem = "the reader belongs to the process that this one was forked from"
            raise RequestError(problem, hint="open the pack again in the child")
        if self._dropped or _orphans:  # mostly not, and this is asked for every expert
            for work in _left(self._dropped):
                work.close()
                self.release(work)
            close_orphans()

    def adopt(self, work: Work) -> None:
        """Add `work` to what `close` has to end. Raises RequestError where that has begun."""
        with self._lock:
            self.check_open()
            self._works.add(work)

    def release(self, work: Work) -> None:
        """Hold `work` no more, which has ended."""
        with self._lock:
            self._works.discard(work)

    def drop(self, work: Work) -> None:
        """Leave `work` for the next call to close; for finalisers."""
        self._dropped.append(work)

    def close(self) -> None:
        """End all work, let nothing begin any more, and close the backend.

        May be called again where it was cut off.
        """
        if self.is_forked:
            return
        with self._closing:
            with self._lock:
                self._budget.close()
                works = list(self._works)
            for work in works:
                work.close()
                self.release(work)
            self._dropped.clear()
            # Of an interrupted read; this thread reads nothing now.
            self._budget.forget(threading.get_ident())
            self._budget.drain()
            if not self._is_over:
                self._backend.close()
                self._is_over = True

    def abandon(self) -> None:
        """End all of a reader that was dropped: now, if there is nothing to wait for."""
        if self._budget.is_spent:
            _orphans.append(self)
        else:
            self.close()


_orphans: deque[OpenWork] = deque()
"""Of readers that were dropped while reads of theirs were in flight."""


def close_orphans() -> None:
    """Close what dropped readers have left."""
    for orphan in _left(_orphans):
        orphan.close()


def _left(works: deque[_AnyWork]) -> Iterator[_AnyWork]:
    """Yield what is on a list, and take it off when it was closed: not where a Ctrl-C came first.

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
