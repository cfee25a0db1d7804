"""The reads that a reader has in flight: their limits, their end, and statistics of all so far.

Beyond about 100 MB in flight drives get slower, not faster, and memory is better used for experts.

A forked child has a copy of the reader and none of its threads: every call is refused there, and
closing does nothing.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from moepack.pack.reading.second_source import MirrorUsage, SecondSource
    from moepack.storage.backend import Backend

DEPTH = 32
MAX_LENGTH = 64 << 20


class Statistics(NamedTuple):
    """Counts of a reader's reads so far.

    `seconds` is the time during which anything was in flight, counted until it was taken, so that
    `read_length` / `seconds` is a lower bound of the throughput. `in_flight_*` is the current
    value, `peak_length` the maximum. `mirror` counts the reads from the pack's mirror; None if none
    is read. `rechecked_count` reads had parts that were right before, and were compared with their
    digests again. Lengths are bytes.
    """

    backend: str
    read_count: int
    error_count: int
    read_length: int
    seconds: float
    in_flight_count: int
    in_flight_length: int
    peak_length: int
    mirror: MirrorUsage | None = None
    rechecked_count: int = 0


class InFlight(Closing):
    """The reads in flight of one reader, over all of its threads and batches.

    `depth` limits their number, `max_length` their bytes. A batch that has nothing in flight may
    always begin one read: so a batch never deadlocks, and a read may exceed the limit. Reads are
    counted by their owner: a batch, or a thread.
    """

    def __init__(
        self, backend: Backend, depth: int, max_length: int, second: SecondSource | None
    ) -> None:
        self.backend = backend
        self.depth = depth
        self.second = second
        self._max_length = max_length
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._closing = threading.RLock()
        self._batches: weakref.WeakSet[Closing] = weakref.WeakSet()
        self._owned: dict[Hashable, tuple[int, int]] = {}
        self._peak = self._reads = self._errors = self._read_length = self._rechecked = 0
        self._busy_seconds = self._busy_since = 0.0
        self.is_closed = self._is_over = False

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise RequestError in a forked child."""
        if self.is_forked:
            problem = "the reader belongs to the process that this one was forked from"
            raise RequestError(problem, hint="open the pack again in the child")

    def check_open(self) -> None:
        """Raise RequestError if the reader is closed, or in a forked child."""
        self.check_process()
        if self.is_closed:
            raise RequestError("the reader is closed")

    def adopt(self, batch: Closing) -> None:
        """Let `close` end a batch too. Raises RequestError if the reader is closed."""
        with self._changed:
            self.check_open()
            self._batches.add(batch)

    def release(self, batch: Closing) -> None:
        """Forget a batch, which has ended."""
        self._batches.discard(batch)

    def _total(self) -> tuple[int, int]:
        """Return the count and the bytes of all reads in flight."""
        count = length = 0
        for owned_count, owned_length in tuple(self._owned.values()):
            count += owned_count
            length += owned_length
        return count, length

    def begin(
        self, owner: Hashable, length: int, *, is_second: bool = False, force: bool = False
    ) -> bool:
        """Count a read of `length` bytes as begun; return False if it may not begin now.

        It may not if that exceeds a limit, unless `force`, or if the reader is closed.
        """
        with self._changed:
            count, total = self._total()
            total += length
            is_full = count >= self.depth or total > self._max_length
            if self.is_closed or (is_full and not force):
                return False
            if not count:
                self._busy_since = time.perf_counter()
            owned_count, owned_length = self._owned.get(owner, (0, 0))
            self._owned[owner] = owned_count + 1, owned_length + length
            if total > self._peak:
                self._peak = total
        if self.second is not None:
            self.second.begin(owner, length, is_second=is_second)
        return True

    def end(
        self, owner: Hashable, length: int, received: int, *, is_second: bool, failed: bool
    ) -> None:
        """Count a read of `length` bytes as ended, with `received` bytes."""
        with self._changed:
            count, owned_length = self._owned.get(owner, (1, length))
            self._reads += 1
            self._read_length += received
            if count > 1:
                self._owned[owner] = count - 1, owned_length - length
            else:
                self._remove(owner)
        if failed:
            self.add_error(is_second=is_second)
        if self.second is not None:
            self.second.end(owner, length, received, is_second=is_second)

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner whose reads nobody takes."""
        with self._changed:
            self._remove(owner)
        if self.second is not None:
            self.second.forget(owner)

    def _remove(self, owner: Hashable) -> None:
        if self._owned.pop(owner, None) is not None:
            if not self._owned:
                self._busy_seconds += time.perf_counter() - self._busy_since
            self._changed.notify_all()

    def add_error(self, *, is_second: bool) -> None:
        """Count an error of a read or of its bytes; one of a mirror is none of the reader's."""
        if self.second is None or self.second.is_backup or not is_second:
            with self._changed:
                self._errors += 1

    def add_recheck(self) -> None:
        """Count a read of parts that were right before, and are compared again."""
        with self._changed:
            self._rechecked += 1

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        with self._changed:
            count, length = self._total()
            busy = time.perf_counter() - self._busy_since if count else 0.0
            return Statistics(
                self.backend.name,
                self._reads,
                self._errors,
                self._read_length,
                self._busy_seconds + busy,
                count,
                length,
                self._peak,
                None if self.second is None else self.second.usage,
                self._rechecked,
            )

    def _threads(self) -> set[Hashable]:
        """Return the threads that read by themselves; what batches read is closed, or dropped."""
        return {owner for owner in self._owned if isinstance(owner, int)}

    def close(self) -> None:
        """End all batches, let nothing begin, wait for other threads, close the backend."""
        if self.is_forked:
            return
        with self._closing:
            with self._changed:
                self.is_closed = True
            for batch in list(self._batches):
                batch.close()
            this_thread = {threading.get_ident()}
            with self._changed:
                self._changed.wait_for(lambda: self._threads() <= this_thread)
            if not self._is_over:
                self.backend.close()
                self._is_over = True
