"""The reads that a reader has in flight: their limits, and statistics of all reads so far.

Beyond about 100 MB in flight drives get slower, not faster, and memory is better used for experts.
"""

import threading
import time
from collections.abc import Hashable
from typing import NamedTuple

DEPTH = 32
MAX_LENGTH = 64 << 20


class MirrorUsage(NamedTuple):
    """Reads from a mirror.

    For `error_count` experts the mirror gave an error or wrong bytes, and the pack served instead.
    """

    read_count: int
    error_count: int
    read_length: int


class Statistics(NamedTuple):
    """Counts of a reader's reads so far.

    `seconds` is the time during which anything was in flight, counted until it was taken, so that
    `read_length` / `seconds` is a lower bound of the throughput. `in_flight_*` is the current
    value, `peak_length` the maximum. `mirror` counts the reads from the pack's mirror; None if none
    is read. Lengths are bytes.
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


class InFlight:
    """Counts the reads in flight of one reader, over all of its threads and batches.

    `depth` limits their number, `max_length` their bytes. A batch that has nothing in flight may
    always begin one read: so a batch never deadlocks, and a read may exceed the limit.

    Reads are counted by their owner, in one place: a signal's handler may raise anywhere, and an
    owner that was interrupted forgets all that is counted for it, whatever that was.
    """

    def __init__(self, backend: str, depth: int, max_length: int) -> None:
        self.depth = depth
        self._backend = backend
        self._max_length = max_length
        self._changed = threading.Condition()  # a signal's handler may come in again
        self._owned: dict[Hashable, tuple[int, int]] = {}
        self._peak = 0
        self._reads = self._errors = self._read_length = 0
        self._busy_seconds = self._busy_since = 0.0
        self.is_closed = False
        """Whether nothing may begin any more; set by `close`."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight; takes no lock."""
        return not self._owned

    def _total(self) -> tuple[int, int]:
        """Return the count and the bytes of all reads in flight."""
        count = length = 0
        for owned_count, owned_length in tuple(self._owned.values()):
            count += owned_count
            length += owned_length
        return count, length

    def begin(self, owner: Hashable, length: int, *, force: bool = False) -> bool:
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
            return True

    def end(self, owner: Hashable, count: int, length: int, received: int, errors: int) -> None:
        """Count `count` reads of `length` bytes in all as ended, with `received` bytes."""
        with self._changed:
            left, left_length = self._owned.pop(owner, (count, length))
            if left > count:
                self._owned[owner] = left - count, left_length - length
            self._reads += count
            self._errors += errors
            self._read_length += received
            self._settle()

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner that has nothing in flight."""
        with self._changed:
            if self._owned.pop(owner, None):
                self._settle()

    def _settle(self) -> None:
        if not self._owned:
            self._busy_seconds += time.perf_counter() - self._busy_since
            self._changed.notify_all()

    def add_error(self) -> None:
        """Count an error in bytes that were read, such as a digest that differs."""
        with self._changed:
            self._errors += 1

    def close(self) -> None:
        """Refuse to begin any more reads."""
        with self._changed:
            self.is_closed = True

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not self._owned)

    def statistics(self, mirror: MirrorUsage | None) -> Statistics:
        """Return the numbers as they are now."""
        with self._changed:
            count, length = self._total()
            busy = time.perf_counter() - self._busy_since if count else 0.0
            return Statistics(
                self._backend,
                self._reads,
                self._errors,
                self._read_length,
                self._busy_seconds + busy,
                count,
                length,
                self._peak,
                mirror,
            )
