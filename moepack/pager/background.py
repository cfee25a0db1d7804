"""A pager that serves in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Self

from moepack.pager.pager import Pager


class PagerThread:
    """Has `pager` serve until this is left, and `tick` called each second; a context manager."""

    def __init__(self, pager: Pager, tick: Callable[[], None] = lambda: None) -> None:
        self._pager, self._tick = pager, tick
        self._ending = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="pager", daemon=True)

    def _serve(self) -> None:
        try:
            self._pager.serve(self._ending, self._tick)
        finally:
            self._pager.disconnect()  # where it failed: programs would wait for ever

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        os.eventfd_write(self._ending, 1)
        self._thread.join()
        os.close(self._ending)
