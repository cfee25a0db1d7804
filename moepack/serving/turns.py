"""One text after the other: clients wait for their turn, and one that goes away ends its text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

from moepack.running.generation import Generation


class BusyError(Exception):
    """As many clients wait as may."""


class Turns:
    """Makes texts one by one, in a thread of their own, in the order in which they were asked for.

    `waiting_count` is how many have not begun, up to `max_waiting`. `ended` is called with each
    that ends, also one that was left, or that an error ended. Used from one event loop.
    """

    def __init__(self, max_waiting: int, ended: Callable[[Generation], None]) -> None:
        self._max_waiting = max_waiting
        self._ended = ended
        self._thread = ThreadPoolExecutor(1, "moepack-text")
        self.waiting_count = 0

    async def pieces(
        self, begin: Callable[[], Generation]
    ) -> AsyncGenerator[str | Generation, None]:
        """Wait for a turn; yield the pieces of the text that `begin` begins, then what it was.

        Where this is left early, the text ends with the step that it is at. Raises what the text
        raises, and BusyError.
        """
        if self.waiting_count >= self._max_waiting:
            raise BusyError
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        is_left = threading.Event()
        has_begun = False

        def began() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self.waiting_count -= 1

        def make() -> Generation:
            loop.call_soon_threadsafe(began)
            generation = None
            try:
                generation = begin()
                for piece in generation.pieces(is_left.is_set):
                    loop.call_soon_threadsafe(queue.put_nowait, piece)
                return generation
            finally:
                if generation is not None:
                    loop.call_soon_threadsafe(self._ended, generation)
                loop.call_soon_threadsafe(queue.put_nowait, None)

        self.waiting_count += 1
        work = loop.run_in_executor(self._thread, make)
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            yield await work
        finally:
            is_left.set()
            if work.cancel():  # it had not begun, or has ended
                began()

    def close(self) -> None:
        """Wait for the text that is being made, and begin no other."""
        self._thread.shutdown(cancel_futures=True)
