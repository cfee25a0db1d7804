"""What a reader has in flight: the bounds on it, and the statistics of what went through.

Beyond about 100 MB in flight drives get slower, not faster, and memory is better used for experts.
"""

import threading
import time
from typing import NamedTuple

from moepack.errors import RequestError

DEPTH = 32
MAX_LENGTH = 64 << 20


class Statistics(NamedTuple):
    """What a reader has read so far.

    `seconds` is the time during which anything was in flight, counted until it was taken, so that
    `read_length` / `seconds` is a lower bound of the throughput. `in_flight_*` is now,
    `peak_length` the most that ever was. Lengths are bytes.
    """

    backend: str
    read_count: int
    error_count: int
    read_length: int
    seconds: float
    in_flight_count: int
    in_flight_length: int
    peak_length: int


class InFlight:
    """Counts the reads in flight of one reader, over all of its threads and batches.

    `depth` bounds their number, `max_length` their bytes. A batch that has nothing in flight may
    always begin one read: so none waits for another's owner to come back, and no read is too long.
    """

    def __init__(self, backend: str, depth: int, max_length: int) -> None:
        self.depth = depth
        self._backend = backend
        self._max_length = max_length
        self._changed = threading.Condition()
        self._closed = False
        self._count = self._length = self._peak = 0
        self._reads = self._errors = self._read_length = 0
        self._busy_seconds = self._busy_since = 0.0

    def begin(self, length: int, *, force: bool = False) -> bool:
        """Count a read of `length` bytes as begun, or say that it may not begin now.

        It may not where the bounds do not allow it, unless `force`, or where the reader is closed.
        """
        with self._changed:
            full = self._count >= self.depth or self._length + length > self._max_length
            if self._closed or (full and not force):
                return False
            if not self._count:
                self._busy_since = time.perf_counter()
            self._count += 1
            self._length += length
            self._peak = max(self._peak, self._length)
            return True

    def end(self, length: int, got: int, *, failed: bool) -> None:
        """Count a read of `length` bytes as ended, with `got` bytes."""
        with self._changed:
            self._count -= 1
            self._length -= length
            self._reads += 1
            self._errors += failed
            self._read_length += got
            if not self._count:
                self._busy_seconds += time.perf_counter() - self._busy_since
                self._changed.notify_all()

    def check_open(self) -> None:
        """Raise RequestError where the reader is closed."""
        if self._closed:
            raise RequestError("the reader is closed")

    def close(self) -> None:
        """Let nothing begin any more."""
        with self._changed:
            self._closed = True

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)

    def statistics(self) -> Statistics:
        """Give the numbers as they are now."""
        with self._changed:
            busy = time.perf_counter() - self._busy_since if self._count else 0.0
            return Statistics(
                self._backend,
                self._reads,
                self._errors,
                self._read_length,
                self._busy_seconds + busy,
                self._count,
                self._length,
                self._peak,
            )
