"""Reads of many experts through one queue: begun in the order asked, within the reader's limits.

An expert waits; it gets memory and its reads begin, as far as the limits and the pool allow; the
reads end in any order; after the last the expert is finished, with an error or without. Nothing
here blocks but `collect` and `close`, and only while something is in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moepack.pack.reading.expert_read import AnyMemory, ExpertRead, FileRead, ReadMemory
    from moepack.pack.reading.in_flight import InFlight
    from moepack.storage.backend import ReadQueue, ReadRequest


class PendingRead:
    """One expert on its way: the plan of its reads, its memory, and its error, if any.

    `memory` is None until the first of its reads begins, unless it is the caller's own. All of it
    comes from one source, the second if `is_second`, which is chosen when the first read begins.
    """

    __slots__ = ("begun_count", "ended_count", "error", "is_second", "memory", "number", "read")

    def __init__(self, number: int, read: ExpertRead, memory: AnyMemory | None) -> None:
        self.number = number
        self.read = read
        self.memory = memory
        self.error: MoepackError | None = None
        self.begun_count = self.ended_count = 0
        self.is_second = False


class Scheduler(Closing):
    """Feeds one queue; used by one thread at a time.

    `allocate` returns the memory for a read, or None if there is none now.
    """

    def __init__(
        self, in_flight: InFlight, allocate: Callable[[ExpertRead], ReadMemory | None]
    ) -> None:
        self._in_flight = in_flight
        self._second = in_flight.second
        self._allocate = allocate
        self._queue: ReadQueue | None = None
        self._waiting: deque[PendingRead] = deque()
        self._started: dict[int, tuple[PendingRead, FileRead, AnyMemory]] = {}
        self._finished: list[PendingRead] = []
        self._next_number = 0

    def add(self, pending: Iterable[PendingRead]) -> None:
        """Queue reads until it is their turn."""
        self._waiting.extend(pending)

    def start(self) -> None:
        """Begin as many reads as may begin. Raises MachineError if the backend has no queue."""
        depth = self._in_flight.depth
        if not self._waiting or len(self._started) >= depth:
            return
        queue = self.queue  # first, so that nothing is counted as begun if there is none
        requests: list[tuple[int, ReadRequest]] = []
        while self._waiting and len(self._started) < depth:
            pending = self._waiting[0]
            if pending.memory is None:
                try:
                    pending.memory = self._allocate(pending.read)
                except MachineError as error:
                    pending.error = error
                    self._finished.append(self._waiting.popleft())
                    continue
            if pending.memory is None or not self._may_begin(pending):
                break
            requests.append(self._begin(pending, pending.memory))
        if requests:
            queue.start(requests)

    def _may_begin(self, pending: PendingRead) -> bool:
        """Count the next read of an expert as begun; return False if it is to wait.

        Before the first of them, choose between both sources.
        """
        if self._second is not None and not pending.begun_count:
            pending.is_second = self._second.takes(pending.read)
        length = pending.read.file_reads[pending.begun_count].length
        return self._in_flight.begin(
            self, length, is_second=pending.is_second, force=not self._started
        )

    def _begin(self, pending: PendingRead, memory: AnyMemory) -> tuple[int, ReadRequest]:
        """Return the request for the next read of the expert that is the first to wait."""
        file_read = pending.read.file_reads[pending.begun_count]
        pending.begun_count += 1
        if pending.begun_count == len(pending.read.file_reads):
            self._waiting.popleft()
        number = self._next_number
        self._next_number = number + 1
        self._started[number] = (pending, file_read, memory)
        request = pending.read.request(file_read, memory)
        if self._second is not None and pending.is_second:
            request = self._second.redirect(request)
        return number, request

    def collect(self, *, wait: bool) -> list[PendingRead]:
        """Return the experts that have finished; with `wait`, at least one, if there are any.

        Raises RequestError if nothing can begin: the reader is closed, or its pool has no free
        buffer.
        """
        self.start()
        while self._started:
            self._end_some(wait=wait and not self._finished)
            self.start()
            if self._finished or not wait:
                break
        finished, self._finished = self._finished, []
        if wait and self._waiting and not finished:
            self._in_flight.check_open()
            hint = "release what was read before, or make the pool larger"
            raise RequestError("all buffers of the pool are taken", hint=hint)
        return finished

    @property
    def queue(self) -> ReadQueue:
        """The backend's queue, made when it is first needed."""
        if self._queue is None:
            backend = self._in_flight.backend
            try:
                self._queue = backend.queue(self._in_flight.depth)
            except OSError as error:
                problem = f"cannot set up {backend.name}: {error.strerror}"
                hint = "take what was submitted before submitting more, or use fewer threads"
                raise MachineError(problem, hint=hint) from error
        return self._queue

    def close(self) -> None:
        """Drop all reads that wait and wait for the others.

        Whoever added reads gives their memory back.
        """
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        self._waiting.clear()
        self._started.clear()
        self._finished.clear()
        self._in_flight.forget(self)

    def _end_some(self, *, wait: bool) -> None:
        """End reads as the queue reports them; with `wait` at least one."""
        for number, request_length, error in self.queue.finished(wait=wait):
            pending, file_read, memory = self._started.pop(number)
            received = pending.read.received(file_read, memory, request_length)
            problem = pending.read.problem(file_read, received, error)
            self._in_flight.end(
                self,
                file_read.length,
                received,
                is_second=pending.is_second,
                failed=problem is not None,
            )
            if problem is not None:
                pending.error = pending.error or problem
                if self._second is not None and pending.is_second:
                    self._second.retire()
            pending.ended_count += 1
            if pending.ended_count == len(pending.read.file_reads):
                self._finished.append(pending)
