"""Long calls into llama.cpp: interruptible by a signal, with its log as error messages."""

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Self, TypeVar

from moepack.running.llama_cpp.structs import LogCallback

_ERROR = 4
_LINE_COUNT = 4
_T = TypeVar("_T")

# Two that are left in the order they were entered give llama.cpp a callback of the past.
_callbacks: list[Any] = []


class InterruptibleCalls:
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
        """Make a call and return its result."""
        try:
            return self._pool.submit(call).result()
        except BaseException:
            self._finish()
            raise

    def _finish(self) -> None:
        last = self._pool.submit(self._stop)
        while not last.done():
            with suppress(BaseException):  # the memory of the call is freed next: it must end first
                self._stop()
                wait([last])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()


class ErrorLines:
    """The last error lines of llama.cpp, and a log that is kept off the terminal.

    A context manager: the log goes where it went before afterwards.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lines: deque[str] = deque(maxlen=_LINE_COUNT)
        self._callback = LogCallback(self._add)
        _callbacks.append(self._callback)
        self._before = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> Self:
        self._library.llama_log_get(*map(ctypes.addressof, self._before))
        self._library.llama_log_set(ctypes.cast(self._callback, ctypes.c_void_p), None)
        return self

    def __exit__(self, *exception: object) -> None:
        self._library.llama_log_set(*self._before)

    def _add(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            self._lines.append(text.decode(errors="replace").strip())

    def clear(self) -> None:
        """Forget the lines so far."""
        self._lines.clear()

    def __str__(self) -> str:
        return "; ".join(self._lines) or "no reason given"
