"""What comes back of several experts: each one's bytes, and the batch that they were asked in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from moepack.errors import MoepackError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moepack.reading.open_work import OpenWork
    from moepack.reading.scheduler import PendingRead, Scheduler
    from moepack.storage.buffers import BufferPool


class ExpertBytes:
    """One expert in memory.

    `view` is the whole blob with its padding, or what was asked for of it; it is writable, and the
    caller's until `release`, which gives a pool's buffer back and does nothing otherwise. `number`
    is the expert's place in the list of keys that it was asked in.
    """

    __slots__ = ("_memory", "_pool", "_read", "number")

    def __init__(self, pool: BufferPool | None, pending: PendingRead) -> None:
        assert pending.memory is not None
        assert not pending.decodings
        self._pool = pool
        self._read = pending.read
        self.number = pending.number
        self._memory = pending.memory

    @property
    def view(self) -> memoryview:
        """All that was read. Raises RequestError where it was scattered."""
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

        `name` as in `Pack.locate`: where a family was named to read, it is one of that family.
        Raises RequestError for one that was not read.
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


class BatchReads:
    """The reads of a batch and their memory. It knows nothing of the batch, which may be dropped.

    Its methods may be called from several threads.
    """

    def __init__(
        self, scheduler: Scheduler, pool: BufferPool | None, pending: Sequence[PendingRead]
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._lock = threading.Lock()
        self._untaken = {read.number: read for read in pending}
        self._ready: dict[int, PendingRead] = {}
        self._was_cut = False
        self.is_open = True

    def __len__(self) -> int:
        return len(self._untaken)

    def start(self) -> None:
        """Begin to read; called once. Raises MachineError where that cannot be."""
        with self._lock:
            self._scheduler.add(self._untaken.values())
            self._scheduler.start()

    def take(self, *, in_order: bool) -> PendingRead | None:
        """Wait for one expert; several threads may, and each gets others. None after the last."""
        with self._lock:
            while self._untaken:
                number = next(iter(self._untaken), None) if in_order else self._next_ready()
                if number in self._ready:
                    self._ready[number].settle()
                    del self._untaken[number]
                    return self._ready.pop(number)
                finished = self._scheduler.take(wait=True)
                if not finished:
                    raise RequestError("an interruption lost some of the batch")
                for pending in finished:
                    self._ready[pending.number] = pending
            if self._was_cut:
                raise RequestError("the batch was closed before all of it was taken")
        return None

    def _next_ready(self) -> int | None:
        """Return the number of an expert that was read; of one that is decoded, if there is one."""
        first = next(iter(self._ready), None)
        if first is None or self._ready[first].is_decoded:
            return first
        return next((n for n, pending in self._ready.items() if pending.is_decoded), first)

    def free(self, pending: PendingRead) -> None:
        """Give back the memory of a read that nobody gets."""
        memory, pending.memory = pending.memory, None
        if self._pool is not None and memory is not None:
            self._pool.give_back(memory.view)

    def close(self) -> None:
        """Begin nothing more, wait for what is in flight, give memory back.

        May be called again where it was cut off.
        """
        with self._lock:
            self._was_cut = self._was_cut or bool(self._untaken)
            self._scheduler.close()
            for pending in (*self._untaken.values(), *self._ready.values()):
                pending.settle()
                self.free(pending)
            self._untaken.clear()
            self._ready.clear()
            self.is_open = False


class Batch:
    """Experts that were asked for together, on their way or there; `Reader.submit` makes it.

    Leaving a `with`, or `close`, gives up what has not begun and waits for what has: until then the
    system may write into the buffers. For a batch that is dropped the reader does so in its next
    call, since a finaliser must not wait.
    """

    def __init__(
        self,
        reads: BatchReads,
        open_work: OpenWork,
        finish: Callable[[PendingRead], None],
        pool: BufferPool | None,
    ) -> None:
        self._reads = reads
        self._open_work = open_work
        self._finish = finish
        self._pool = pool

    def __len__(self) -> int:
        """Return how many experts have not been taken yet."""
        return len(self._reads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._reads.is_open:
            self._open_work.drop(self._reads)

    def completions(self, *, in_order: bool = False) -> Iterator[ExpertBytes]:
        """Yield the experts as they come from the disk, or in the order in which they were asked.

        An expert that could not be read raises its error in its turn; asking again goes on with the
        rest. Reads that the reader's bounds held back begin here. Raises RequestError where the
        batch or its reader was closed before all experts were taken, and in a forked child.
        """
        while True:
            self._open_work.close_dropped()
            pending = self._reads.take(in_order=in_order)
            if pending is None:
                return
            yield self._open(pending)

    def close(self) -> None:
        """Give up the rest: begin nothing more, wait for what is in flight, free the buffers."""
        if not self._open_work.is_forked:
            self._reads.close()
            self._open_work.release(self._reads)

    def _open(self, pending: PendingRead) -> ExpertBytes:
        try:
            self._finish(pending)
        except MoepackError:
            pending.error = None  # the error's traceback holds the read
            self._reads.free(pending)
            raise
        return ExpertBytes(self._pool, pending)
