"""A backend that reads with a real one, and fails, lies or dawdles as it is told.

It checks the contract from the other side as well: no more requests than the queue's depth, no
request that is forgotten, no file closed under a queue; and it measures what is in flight.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import pytest

import moepack
from moepack.common.errors import MachineError
from moepack.pack.reading.pack import Pack
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest
from moepack.storage.threaded import ThreadedBackend
from tests.support.children import PATIENCE

NAMES = ("buffered", "direct")


def make(name: str) -> Backend:
    return ThreadedBackend(direct=name == "direct")


def require(name: str, pack_path: Path) -> str:
    """Return `name` back, or skip the test where that backend does not work."""
    try:
        with moepack.open(pack_path) as pack:
            pack.reader(backend=name).close()
    except MachineError as error:
        pytest.skip(str(error))
    return name


@dataclass
class Fault:
    """What happens to reads of `path` at `offset` (None: to all), `times` times (None: always).

    They wait for `until` and `delay` seconds before anything is read; then they fail with the
    errno `code`, or end `missing` bytes early, or have a bit flipped in byte `flip`.
    """

    code: int = 0
    missing: int = 0
    flip: int | None = None
    delay: float = 0.0
    until: threading.Event | None = None
    path: Path | None = None
    offset: int | None = None
    times: int | None = None

    def meets(self, request: ReadRequest) -> bool:
        """Return whether this happens to `request`, and count it."""
        end = request.offset + request.length
        if self.path not in (None, request.path):
            return False
        if self.offset is not None and not request.offset <= self.offset < end:
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0

    def wait(self) -> None:
        if self.until is not None:
            assert self.until.wait(PATIENCE), "nobody let the read go on"
        time.sleep(self.delay)

    def spoil(self, request: ReadRequest, completion: Completion) -> Completion:
        if self.code:
            return completion._replace(length=0, error=OSError(self.code, os.strerror(self.code)))
        if self.missing:
            length = max(0, completion.length - self.missing)
            request.buffer[length:] = bytes(max(0, len(request.buffer) - length))
            return completion._replace(length=length)
        if self.flip is not None:
            request.buffer[self.flip] ^= 1
        return completion


NO_FAULT = Fault()


class Begun(NamedTuple):
    """A request as it was begun."""

    path: Path
    offset: int
    length: int


def fault_at(pack: Pack, layer: int, expert: int, part: str | None = None, **what: Any) -> Fault:
    """Make a fault of the reads of one blob or one part."""
    where = pack.locate(layer, expert, part) if part else pack.locate(layer, expert)
    return Fault(path=where.path, offset=where.offset, **what)


class FaultyBackend:
    """Reads with `inner`, but for `faults`. With `shuffle`, all that is in flight ends together.

    `shuffle` then puts the completions in another order. `begun` lists the requests, `peak_count`
    is how many were in flight at a time through queues.
    """

    def __init__(
        self,
        inner: Backend,
        *faults: Fault,
        shuffle: Callable[[list[Completion]], None] | None = None,
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self.faults = list(faults)
        self.shuffle = shuffle
        self.begun: list[Begun] = []
        self.peak_count = 0
        self.open_queues = 0
        self.is_closed = False
        self._count = 0
        self._lock = threading.Lock()

    def read(self, request: ReadRequest) -> Completion:
        fault = self.fault_of(request)
        return self.do(fault, 0, request)

    def queue(self, depth: int) -> "FaultyQueue":
        queue = FaultyQueue(self, self.inner.queue(depth), depth)
        with self._lock:
            self.open_queues += 1
        return queue

    def close(self) -> None:
        assert not self._count, "files are closed under a read"
        assert not self.is_closed, "closed twice"
        self.is_closed = True
        self.inner.close()

    def fault_of(self, request: ReadRequest) -> Fault:
        """Note a request, and return its fault."""
        with self._lock:
            self.begun.append(Begun(request.path, request.offset, request.length))
            return next((fault for fault in self.faults if fault.meets(request)), NO_FAULT)

    def do(self, fault: Fault, number: int, request: ReadRequest) -> Completion:
        fault.wait()
        return fault.spoil(request, self.inner.read(request)._replace(number=number))

    def count(self, step: int) -> None:
        with self._lock:
            self._count += step
            self.peak_count = max(self.peak_count, self._count)

    def forget_queue(self) -> None:
        with self._lock:
            self.open_queues -= 1


class FaultyQueue:
    """A queue of the real backend, beside threads for the reads that dawdle."""

    def __init__(self, backend: FaultyBackend, inner: ReadQueue, depth: int) -> None:
        self._backend = backend
        self._inner = inner
        self._depth = depth
        self._requests: dict[int, tuple[Fault, ReadRequest]] = {}
        self._late_numbers: set[int] = set()
        self._late: SimpleQueue[Completion] = SimpleQueue()
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._ready: list[Completion] = []
        self._vain_waits = 0

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        at_once = []
        for number, request in requests:
            assert number not in self._requests
            fault = self._backend.fault_of(request)
            self._requests[number] = (fault, request)
            self._backend.count(1)
            if fault.delay or fault.until:
                self._late_numbers.add(number)
                has_ended = threading.Event()
                thread = threading.Thread(
                    target=self._do_late, args=(fault, number, request, has_ended), daemon=True
                )
                self._threads.append((thread, has_ended))
                thread.start()
            else:
                at_once.append((number, request))
        assert len(self._requests) <= self._depth, "more in flight than the queue was made for"
        if at_once:
            self._inner.start(at_once)

    def finished(self, *, wait: bool) -> list[Completion]:
        self._vain_waits = self._vain_waits + 1 if wait and not self._requests else 0
        assert self._vain_waits < 1000, "waits for ever, and nothing is in flight"
        deadline = time.monotonic() + PATIENCE
        while True:
            self._collect(wait=wait and not self._ready and not self._late_numbers)
            is_whole = len(self._ready) == len(self._requests)
            if self._ready and (is_whole or not self._backend.shuffle):
                return self._hand_over()
            if not wait or not self._requests:
                return []
            assert time.monotonic() < deadline, "nothing ends"
            time.sleep(0.0005)

    def cancel(self) -> None:
        self._inner.cancel()

    def close(self) -> None:
        for thread, has_ended in self._threads:
            # Python 3.11 takes a thread for dead whose `join` a signal cuts off: so not that alone.
            assert has_ended.wait(PATIENCE)
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self._inner.close()
        self._backend.count(-len(self._requests))
        self._requests.clear()
        self._backend.forget_queue()

    def _do_late(
        self, fault: Fault, number: int, request: ReadRequest, has_ended: threading.Event
    ) -> None:
        try:
            self._late.put(self._backend.do(fault, number, request))
        finally:
            has_ended.set()

    def _collect(self, *, wait: bool) -> None:
        for completion in self._inner.finished(wait=wait):
            fault, request = self._requests[completion.number]
            self._ready.append(fault.spoil(request, completion))
        try:
            while True:
                completion = self._late.get_nowait()
                self._late_numbers.remove(completion.number)
                self._ready.append(completion)
        except Empty:
            pass

    def _hand_over(self) -> list[Completion]:
        """Return what is ready; where that is shuffled, one at a time."""
        count = len(self._ready)
        if self._backend.shuffle is not None:
            self._backend.shuffle(self._ready)
            count = 1
        ended, self._ready = self._ready[:count], self._ready[count:]
        for completion in ended:
            del self._requests[completion.number]
            self._backend.count(-1)
        return ended
