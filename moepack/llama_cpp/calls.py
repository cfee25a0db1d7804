"""Long calls into llama.cpp, which a signal ends."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Self, TypeVar

_T = TypeVar("_T")


class Calls:
    """Makes long calls into llama.cpp, in a thread of their own. A context manager.

    What a signal's handler raises (as KeyboardInterrupt) comes up in Python's main thread, between
    two instructions: were llama.cpp called there, that would be in a callback, ahead of its `try`,
    and ctypes would drop it. So the main thread waits; if that is interrupted, `stop` asks the call
    to end, and the interruption goes on when it has.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._pool = ThreadPoolExecutor(1, "llama.cpp")

    def run(self, call: Callable[[], _T]) -> _T:
        """Make a call and give its result."""
        try:
            return self._pool.submit(call).result()
        except BaseException:
            self._finish()
            raise

    def _finish(self) -> None:
        last = self._pool.submit(self._stop)
        while not last.done():
            with suppress(BaseException):  # what the call uses is freed next: it must end first
                self._stop()
                wait([last])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
