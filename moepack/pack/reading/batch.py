"""Experts that are read together: one queue, begun in the order asked, within the reader's limits.

An expert waits; it gets memory and its reads begin, as far as the limits allow; the reads end in
any order; after the last the expert is ready, with an error or without.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, RequestError
from moepack.pack.reading.expert_read import new_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moepack.pack.reading.checked_reads import CheckedReads, PendingRead
    from moepack.pack.reading.expert_read import AnyMemory, FileRead
    from moepack.storage.arena import Arena
    from moepack.storage.backend import ReadQueue, ReadRequest


class ExpertBytes:
    """One expert in memory.

    `view` is the whole blob with its padding, or the bytes of the requested parts; it is writable,
    and the caller's. `number` is the index of the expert in the list of keys.
    """

    __slots__ = ("_memory", "_read", "number")

    def __init__(self, pending: PendingRead) -> None:
        assert pending.memory is not None
        self._read = pending.read
        self._memory = pending.memory
        self.number = pending.number

    @property
    def view(self) -> memoryview:
        """All bytes that were read. Raises RequestError if they were scattered."""
        return self._memory.view

    def __repr__(self) -> str:
        length = f"{self._read.length:,} bytes"
        return f"<moepack.ExpertBytes: layer {self.layer} expert {self.expert}, {length}>"

    @property
    def layer(self) -> int:
        """The layer."""
        return self._read.layer

    @property
    def expert(self) -> int:
        """The expert's number in its layer."""
        return self._read.expert

    def part(self, name: str) -> memoryview:
        """Return one part's bytes, without padding.

        `name` as in `Pack.locate`; if a family was named to read, a part of that family. Raises
        RequestError for a part that was not read.
        """
        return self._memory.part(self._read.part(name))


class Batch(Closing):
    """Experts that are read together; `Reader.submit` makes it. Several threads may take them.

    Leaving a `with`, or `close`, cancels the reads that have not begun and waits for the others. A
    batch that is merely dropped waits for nothing: until its reads have ended, they write into the
    caller's buffers. `keeper` is kept alive as long as this: the reader, whose end closes the
    files.
    """

    def __init__(
        self, keeper: object, reads: CheckedReads, arena: Arena, pending: Sequence[PendingRead]
    ) -> None:
        self._keeper = keeper
        self._reads = reads
        self._in_flight = reads.in_flight
        self._second = reads.in_flight.second
        self._arena = arena
        self._queue: ReadQueue | None = None
        self._owner = object()  # of what is in flight; that must not keep the batch alive
        self._lock = threading.Lock()
        self._untaken = {one.number: one for one in pending}
        self._waiting = deque(pending)
        self._started: dict[int, tuple[PendingRead, FileRead, AnyMemory]] = {}
        self._ready: dict[int, PendingRead] = {}
        self._next_number = 0
        self._was_cut = False
        self._in_flight.adopt(self)

    def __len__(self) -> int:
        """Return how many experts have not been taken yet."""
        return len(self._untaken)

    def __del__(self) -> None:
        # No wait: the collector may run this in a thread that does one of the reads.
        if not self._in_flight.is_forked:
            if self._queue is not None:
                self._queue.cancel()
            self._in_flight.forget(self._owner)

    def start(self) -> None:
        """Begin to read; called once."""
        with self._lock:
            self._begin_all()

    def completions(self, *, in_order: bool = False) -> Iterator[ExpertBytes]:
        """Yield the experts as their reads finish, or in the order of their keys.

        An expert that could not be read raises its error in its turn; another call continues with
        the rest. Reads that the reader's limits held back begin here. Raises RequestError if the
        batch or its reader was closed before all experts were taken, and in a forked child.
        """
        while True:
            self._in_flight.check_process()
            pending = self._next(in_order=in_order)
            if pending is None:
                return
            try:
                self._reads.finish(pending)
            except MoepackError:
                pending.error = pending.memory = None  # the error's traceback holds the read
                raise
            yield ExpertBytes(pending)

    def close(self) -> None:
        """Cancel the reads that have not begun, wait for the others, free their memory."""
        if self._in_flight.is_forked:
            return
        with self._lock:
            self._was_cut = self._was_cut or bool(self._untaken)
            if self._queue is not None:
                self._queue.close()
                self._queue = None
            for reads in (self._untaken, self._waiting, self._started, self._ready):
                reads.clear()
        self._in_flight.forget(self._owner)
        self._in_flight.release(self)

    def _next(self, *, in_order: bool) -> PendingRead | None:
        """Wait for an expert that no other thread has got, and return it; None after the last."""
        with self._lock:
            while self._untaken:
                number = next(iter(self._untaken if in_order else self._ready), None)
                if number in self._ready:
                    del self._untaken[number]
                    return self._ready.pop(number)
                self._wait()
            if self._was_cut:
                raise RequestError("the batch was closed before all of it was taken")
        return None

    def _wait(self) -> None:
        """Begin what may begin, and wait until another expert is ready."""
        ready_count = len(self._ready)
        self._begin_all()
        while self._started and len(self._ready) == ready_count:
            self._end_some()
            self._begin_all()
        if len(self._ready) == ready_count:
            self._in_flight.check_open()
            raise RequestError("an interruption lost some of the batch")

    def _begin_all(self) -> None:
        """Begin as many reads as may begin."""
        depth = self._in_flight.depth
        if not self._waiting or len(self._started) >= depth:
            return
        if self._queue is None:
            self._queue = self._in_flight.backend.queue(depth)
        requests: list[tuple[int, ReadRequest]] = []
        while self._waiting and len(self._started) < depth:
            pending = self._waiting[0]
            if pending.memory is None:
                try:
                    pending.memory = new_memory(self._arena, pending.read)
                except MachineError as error:
                    pending.error = error
                    self._ready[pending.number] = self._waiting.popleft()
                    continue
            if not self._may_begin(pending):
                break
            requests.append(self._begin(pending, pending.memory))
        if requests:
            self._queue.start(requests)

    def _may_begin(self, pending: PendingRead) -> bool:
        """Count the next read of an expert as begun; return False if it is to wait.

        Before the first of them, choose between both sources.
        """
        if not pending.begun_count:
            pending.is_second = self._in_flight.takes_second(pending.read)
        length = pending.read.file_reads[pending.begun_count].length
        return self._in_flight.begin(
            self._owner, length, is_second=pending.is_second, force=not self._started
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

    def _end_some(self) -> None:
        """End reads as the queue reports them, at least one."""
        assert self._queue is not None
        for number, request_length, error in self._queue.finished(wait=True):
            pending, file_read, memory = self._started.pop(number)
            received = pending.read.received(file_read, memory, request_length)
            problem = pending.read.problem(file_read, received, error)
            self._in_flight.end(
                self._owner,
                file_read.length,
                received,
                is_second=pending.is_second,
                failed=problem is not None,
            )
            if problem is not None:
                pending.error = pending.error or problem
                if self._second is not None and pending.is_second:
                    self._second.is_retired = True
            pending.ended_count += 1
            if pending.ended_count == len(pending.read.file_reads):
                self._ready[pending.number] = pending
