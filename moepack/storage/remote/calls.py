"""Calls of a store's client that a thread can stop waiting for, at a signal or with its pool.

A client's blocking calls hear of no signal until they return, which may take minutes. So its calls
are futures of an event loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # they are slow to load
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")


class CanceledError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


class CallGroup:
    """The calls of some threads: once they are stopped, each of them raises CanceledError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._is_stopped = False

    def enter(self) -> None:
        """Make all further calls of this thread members of the group."""
        _thread.group = self

    def stop(self) -> None:
        """Stop all calls, also later ones; threads that wait for one go on at once."""
        with self._lock:
            self._is_stopped = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def wait(self, future: Future[T]) -> T:
        """Return the result of a call; cancel it if the group is stopped, or at a signal."""
        from concurrent.futures import CancelledError

        with self._lock:
            self._waiting.add(future)
            is_stopped = self._is_stopped
        try:
            if is_stopped:
                raise CanceledError
            return future.result()
        except CancelledError:
            raise CanceledError from None
        finally:
            future.cancel()  # without effect on one that is done
            with self._lock:
                self._waiting.discard(future)


class _Thread(threading.local):
    """The group of a thread; without one a call is stopped by signals alone."""

    def __init__(self) -> None:
        self.group = CallGroup()


_thread = _Thread()


def wait_for(call: Callable[[], Awaitable[T]]) -> T:
    """Make an asynchronous call in the event loop of this process, and return its result."""
    import asyncio

    async def run() -> T:
        return await call()

    return _thread.group.wait(asyncio.run_coroutine_threadsafe(run(), _loop(os.getpid())))


def pause(seconds: float) -> None:
    """Wait for so many seconds, as for a call."""
    import asyncio

    wait_for(lambda: asyncio.sleep(seconds))


@lru_cache(maxsize=1)
def _loop(_process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process; a forked child has not its parent's thread."""
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="moepack-calls", daemon=True).start()
    return loop
