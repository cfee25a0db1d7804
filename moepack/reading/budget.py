"""What a reader has in flight: the bounds on it, and the statistics of what went through.

Beyond about 100 MB in flight drives get slower, not faster, and memory is better used for experts.
"""

import threading
import time
from collections.abc import Hashable
from typing import NamedTuple

DEPTH = 32
MAX_LENGTH = 64 << 20


class MirrorUsage(NamedTuple):
    """What a reader has read from a mirror.

    For `error_count` experts the mirror gave an error or wrong bytes, and the pack served instead.
    """

    read_count: int
    error_count: int
    read_length: int


class Statistics(NamedTuple):
    """What a reader has read so far.

    `seconds` is the time during which anything was in flight, counted until it was taken, so that
    `read_length` / `seconds` is a lower bound of the throughput. `in_flight_*` is now,
    `peak_length` the most that ever was. `mirror` is what of it the pack's mirror gave, None where
    none is read. Lengths are bytes.
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


class Budget:
    """Counts the reads in flight of one reader, over all of its threads and batches.

    `depth` bounds their number, `max_length` their bytes. A batch that has nothing in flight may
    always begin one read: so none waits for another's owner to come back, and no read is too long.

    Reads are counted by their owner, in one place: a signal's handler may raise anywhere, and an
    owner that was interrupted forgets all that is counted for it, whatever that was.
    """

    def __init__(self, backend: str, depth: int, max_length: int) -> None:
        self.depth = depth
        self._backend = backend
        self._max_length = max_length
        self._lock = threading.RLock()  # with which a signal's handler may come in again
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._owned: dict[Hashable, tuple[int, int]] = {}
        self._peak = 0
        self._reads = self._errors = self._read_length = 0
        self._busy_seconds = self._busy_since = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether nothing may begin any more."""
        return self._is_closed

    @property
    def is_spent(self) -> bool:
        """Whether anything is in flight; takes no lock."""
        return bool(self._owned)

    def _in_flight(self) -> tuple[int, int]:
        """Count what is in flight: reads and bytes."""
        count = length = 0
        for owned_count, owned_length in tuple(self._owned.values()):
            count += owned_count
            length += owned_length
        return count, length

    def begin(self, owner: Hashable, length: int, *, force: bool = False) -> bool:
        """Count a read of `length` bytes as begun; return False where it may not begin now.

        It may not where the bounds do not allow it, unless `force`, or where the reader is closed.
        """
        with self._lock:
            count, total = self._in_flight()
            total += length
            is_full = count >= self.depth or total > self._max_length
            if self._is_closed or (is_full and not force):
                return False
            if not count:
                self._busy_since = time.perf_counter()
            owned_count, owned_length = self._owned.get(owner, (0, 0))
            self._owned[owner] = owned_count + 1, owned_length + length
            if total > self._peak:
                self._peak = total
            return True

    def end(self, owner: Hashable, count: int, length: int, got: int, errors: int) -> None:
        """Count `count` reads of `length` bytes in all as ended, with `got` bytes and `errors`."""
        with self._lock:
            left, left_length = self._owned.pop(owner, (count, length))
            if left > count:
                self._owned[owner] = left - count, left_length - length
            self._reads += count
            self._errors += errors
            self._read_length += got
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
        """Count an error in what was read, such as a digest that differs."""
        with self._changed:
            self._errors += 1

    def close(self) -> None:
        """Let nothing begin any more."""
        with self._changed:
            self._is_closed = True

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not self._owned)

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        with self._changed:
            count, length = self._in_flight()
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
            )
