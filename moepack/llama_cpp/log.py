"""What llama.cpp logs: kept off the terminal, its last errors for our own."""

import ctypes
from collections import deque
from typing import Any, Self

from moepack.llama_cpp.structs import LogCallback

_ERROR = 4
_KEPT_LINES = 4
_pointer = ctypes.c_void_p

# Two that are left in the order they were entered give llama.cpp a callback of the past.
_kept_callbacks: list[Any] = []


class ErrorLines:
    """Keeps llama.cpp's last error lines, and all else that it logs off the terminal.

    A context manager: whoever had the log before has it again afterwards.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._callback = LogCallback(self._add)
        _kept_callbacks.append(self._callback)
        self._before = _pointer(), _pointer()

    def __enter__(self) -> Self:
        self._library.llama_log_get(*map(ctypes.addressof, self._before))
        self._library.llama_log_set(ctypes.cast(self._callback, _pointer), None)
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
