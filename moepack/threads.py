"""The backends `buffered` and `direct`: positioned reads, many at a time in a few threads.

`os.preadv` lets go of the interpreter lock while it reads. Threads are started when there is work
for them, and end when the backend is closed.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from moepack import rounding
from moepack.backends import Completion, ReadRequest
from moepack.files import Files, open_buffered, open_direct

MAX_THREADS = 64


class ThreadedBackend:
    """Reads with `os.preadv`: through the page cache, or past it where `direct`."""

    def __init__(self, *, direct: bool) -> None:
        self.name = "direct" if direct else "buffered"
        self._files = Files(open_direct if direct else open_buffered)
        self._work: SimpleQueue[_Started | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.Lock()

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        return rounding.read(self._files, 0, request)

    def queue(self, depth: int) -> "ThreadedQueue":
        """Make a queue; more than MAX_THREADS requests are never read at a time."""
        return ThreadedQueue(self)

    def close(self) -> None:
        """End the threads and close all files."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._files.close()

    def begin(self, queue: "ThreadedQueue", number: int, request: ReadRequest) -> None:
        """Let a thread do a request and give its completion to `queue`."""
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, MAX_THREADS):
                self._add_thread()
        self._work.put((queue, number, request))
        if not self._threads:
            self._do(self._work.get())

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="moepack-read", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more to be had: those that are there do it
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._do(work)
            del work  # a waiting thread keeps no buffer alive

    def _do(self, work: "_Started | None") -> None:
        assert work is not None
        queue, number, request = work
        completion = None if queue.closing else rounding.read(self._files, number, request)
        with self._lock:
            self._unfinished -= 1
        queue.end(completion)


class ThreadedQueue:
    """The requests of one caller that threads are doing."""

    def __init__(self, backend: ThreadedBackend) -> None:
        self.closing = False
        self._backend = backend
        self._ended: SimpleQueue[Completion | None] = SimpleQueue()
        self._in_flight = 0
        self._signal: _Signal | None = None
        self._ending = threading.Lock()

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Hand requests to the threads."""
        for number, request in requests:
            self._in_flight += 1
            self._backend.begin(self, number, request)

    def finished(self, *, wait: bool) -> list[Completion]:
        """Take the completions that are there; with `wait`, at least one."""
        if self._signal is not None:
            self._signal.clear()
        found: list[Completion] = []
        wait = wait and self._in_flight > 0
        try:
            while True:
                completion = self._ended.get(block=wait and not found)
                self._in_flight -= 1
                if completion is not None:
                    found.append(completion)
        except Empty:
            return found

    def end(self, completion: Completion | None) -> None:
        """Take a request back from a thread; None for one that was given up."""
        with self._ending:  # else the owner could close the signal in between
            self._ended.put(completion)
            if self._signal is not None:
                self._signal.set()

    def fileno(self) -> int:
        """Give a descriptor that is readable when requests have ended."""
        if self._signal is None:
            self._signal = _Signal()
        return self._signal.fileno()

    def close(self) -> None:
        """Give up what no thread has begun, and wait for the rest."""
        self.closing = True
        while self._in_flight:
            self._ended.get()
            self._in_flight -= 1
        with self._ending:
            if self._signal is not None:
                self._signal.close()
                self._signal = None


_Started = tuple[ThreadedQueue, int, ReadRequest]


class _Signal:
    """A pipe that is readable while it is set."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def fileno(self) -> int:
        return self._reading

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is set
            os.write(self._writing, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)
