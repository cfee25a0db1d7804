"""Work shared by several threads, on a machine that may not have as many."""

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, ParamSpec, TypeVar

from moepack.common.errors import NO_THREADS_HINT, MachineError, shortage_behind
from moepack.storage.remote.calls import CallGroup, CanceledError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_START_LENGTH = 4 << 20
"""Bytes of address space with which a thread can begin: Python takes them by the MiB."""


class SharedProgress:
    """Passes the progress of all threads on to `advanced`, from one thread at a time.

    Once it is stopped, every call raises CanceledError: threads that report progress end soon.
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
        """Make every later call raise CanceledError."""
        self._stop.set()


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that raises MachineError if no thread can be started, or has no memory.

    If its block ends early, what has not begun is cancelled, calls of stores end at once, and
    threads that report to `progress` end soon.
    """

    def __init__(self, max_workers: int, progress: SharedProgress | None = None) -> None:
        self._calls = CallGroup()
        self._progress = progress
        super().__init__(max_workers, initializer=self._calls.enter)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do as ThreadPoolExecutor does."""
        try:
            # Python waits for ever for a thread that finds no memory as it begins.
            mmap.mmap(-1, _START_LENGTH).close()
            return super().submit(fn, *args, **kwargs)
        except OSError as error:
            raise shortage_behind(error) or error from None
        except RuntimeError as error:
            raise MachineError(str(error), hint=NO_THREADS_HINT) from error

    def __exit__(self, kind: type[BaseException] | None, *others: Any) -> None:
        if kind is not None:
            self._calls.stop()
            if self._progress is not None:
                self._progress.stop()
        self.shutdown(cancel_futures=kind is not None)


def run_each(
    work: Callable[[T, Callable[[int], None]], R],
    items: Sequence[T],
    threads: int,
    advanced: Callable[[int], None],
) -> list[R]:
    """Call `work` for each item, in `threads`; return its results in the order of the items.

    Its arguments are the item, and a function to call with the bytes done since the last call. The
    first failure, or an interruption, stops all others at their next such call, and is raised.
    """
    shared = SharedProgress(advanced)
    with ThreadPool(threads, shared) as executor:
        futures = [executor.submit(work, item, shared) for item in items]
        for future in as_completed(futures):
            future.result()
    return [future.result() for future in futures]
