"""Experts that are read together: the batch, and the bytes of each expert."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from moepack.common.closing import Closing
from moepack.common.errors import MoepackError, RequestError
from moepack.pack.reading.in_flight import drop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moepack.pack.reading.in_flight import InFlight
    from moepack.pack.reading.scheduler import PendingRead, Scheduler
    from moepack.storage.buffers import BufferPool


class ExpertBytes:
    """One expert in memory.

    `view` is the whole blob with its padding, or the bytes of the requested parts; it is writable,
    and the caller's until `release`, which gives a pool's buffer back and does nothing otherwise.
    `number` is the index of the expert in the list of keys.
    """

    __slots__ = ("_memory", "_pool", "_read", "number")

    def __init__(self, pool: BufferPool | None, pending: PendingRead) -> None:
        assert pending.memory is not None
        self._pool = pool
        self._read = pending.read
        self.number = pending.number
        self._memory = pending.memory

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

    def release(self) -> None:
        """Give the buffer back to the reader's pool; neither it nor its views may be used then."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give_back(self.view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class BatchReads(Closing):
    """The reads of a batch and their memory; used by several threads.

    It does not refer to the batch, which may be dropped.
    """

    def __init__(
        self,
        in_flight: InFlight,
        scheduler: Scheduler,
        pool: BufferPool | None,
        pending: Sequence[PendingRead],
    ) -> None:
        self.in_flight = in_flight
        self._scheduler = scheduler
        self.pool = pool
        self._lock = threading.Lock()
        self.untaken = {read.number: read for read in pending}
        self._ready: dict[int, PendingRead] = {}
        self._was_cut = False
        self.is_open = True

    def start(self) -> None:
        """Begin to read; called once. Raises MachineError if the backend has no queue."""
        with self._lock:
            self._scheduler.add(self.untaken.values())
            self._scheduler.start()

    def next_read(self, *, in_order: bool) -> PendingRead | None:
        """Wait for an expert that no other thread has got, and return it; None after the last."""
        with self._lock:
            while self.untaken:
                number = next(iter(self.untaken if in_order else self._ready), None)
                if number in self._ready:
                    del self.untaken[number]
                    return self._ready.pop(number)
                finished = self._scheduler.collect(wait=True)
                if not finished:
                    raise RequestError("an interruption lost some of the batch")
                for pending in finished:
                    self._ready[pending.number] = pending
            if self._was_cut:
                raise RequestError("the batch was closed before all of it was taken")
        return None

    def free(self, pending: PendingRead) -> None:
        """Give back the memory of a read that nobody gets."""
        memory, pending.memory = pending.memory, None
        if self.pool is not None and memory is not None:
            self.pool.give_back(memory.view)

    def close(self) -> None:
        """Drop all reads that have not begun, wait for the others, give memory back."""
        if self.in_flight.is_forked:
            return
        with self._lock:
            self._was_cut = self._was_cut or bool(self.untaken)
            self._scheduler.close()
            for pending in (*self.untaken.values(), *self._ready.values()):
                self.free(pending)
            self.untaken.clear()
            self._ready.clear()
            self.is_open = False
        self.in_flight.release(self)


class Batch(Closing):
    """Experts that are read together; `Reader.submit` makes it.

    Leaving a `with`, or `close`, cancels the reads that have not begun and waits for the others:
    until then the system may write into the buffers. If a batch is merely dropped, the reader does
    so in its next call, since a finaliser must not wait.
    """

    def __init__(self, reads: BatchReads, finish: Callable[[PendingRead], None]) -> None:
        self._reads = reads
        self._finish = finish

    def __len__(self) -> int:
        """Return how many experts have not been taken yet."""
        return len(self._reads.untaken)

    def __del__(self) -> None:
        if self._reads.is_open:
            drop(self._reads)

    def completions(self, *, in_order: bool = False) -> Iterator[ExpertBytes]:
        """Yield the experts as their reads finish, or in the order of their keys.

        An expert that could not be read raises its error in its turn; another call continues with
        the rest. Reads that the reader's limits held back begin here. Raises RequestError if the
        batch or its reader was closed before all experts were taken, and in a forked child.
        """
        while True:
            self._reads.in_flight.close_dropped()
            pending = self._reads.next_read(in_order=in_order)
            if pending is None:
                return
            try:
                self._finish(pending)
            except MoepackError:
                pending.error = None  # the error's traceback holds the read
                self._reads.free(pending)
                raise
            yield ExpertBytes(self._reads.pool, pending)

    def close(self) -> None:
        """Cancel the reads that have not begun, wait for the others, free the buffers."""
        self._reads.close()
