"""Work that several threads share, on a machine that may have no more of them."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import ParamSpec, TypeVar

from moepack.errors import NO_THREADS_HINT, MachineError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class CanceledError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` and `map` raise MachineError where no thread starts."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do as ThreadPoolExecutor does."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise MachineError(str(error), hint=NO_THREADS_HINT) from error


class SharedProgress:
    """Takes the bytes that any thread has done on to `advanced`, from one thread at a time.

    Once it is stopped, every call raises CanceledError: threads that report what they do end soon.
    """

    def __init__(self, advanced: Callable[[int], None]) -> None:
        self._advanced = advanced
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __call__(self, length: int) -> None:
        """Count `length` bytes as done."""
        if self._stop.is_set():
            raise CanceledError
        with self._lock:
            self._advanced(length)

    def stop(self) -> None:
        """Let every later call raise CanceledError."""
        self._stop.set()


def run_each(
    work: Callable[[T, Callable[[int], None]], R],
    items: Sequence[T],
    threads: int,
    advanced: Callable[[int], None],
) -> list[R]:
    """Call `work` for each item, in `threads`; return what it returned, in the order of the items.

    It is given the item, and what to call with the bytes done since its last call. The first
    failure, or an interruption, stops all others where they next call that, and is raised.
    """
    shared = SharedProgress(advanced)
    with ThreadPool(max_workers=threads) as executor:
        try:
            futures = [executor.submit(work, item, shared) for item in items]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            shared.stop()
            executor.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]
