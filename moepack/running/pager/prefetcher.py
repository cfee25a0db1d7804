"""Reads experts before they are used, while programs compute."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from moepack.common.errors import MoepackError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.pack.reading.batch import ExpertBytes
from moepack.pack.reading.reader import Reader
from moepack.pack.reading.scheduler import PendingRead

_IN_FLIGHT_LIMIT = 64 << 20
"""Bytes that are in flight at once: demanded reads wait for these at most."""


class Prefetcher:
    """Experts that are queued, in flight or complete, until they are collected.

    `lengths` are the bytes of each. `allocate` returns the buffers of an expert, None for memory
    of the reader's, which `receive` gets when it is complete; `discard` frees unused experts.
    Experts that cannot be read are discarded: demanding them raises the error.
    """

    def __init__(
        self,
        reader: Reader,
        lengths: Mapping[ExpertKey, int],
        allocate: Callable[[ExpertKey], Mapping[str, memoryview] | None],
        receive: Callable[[ExpertKey, ExpertBytes], None],
        discard: Callable[[Iterable[ExpertKey]], None],
    ) -> None:
        self._reader = reader
        self._lengths = lengths
        self._allocate, self._receive, self._discard = allocate, receive, discard
        self._scheduler = reader.scheduler()
        self._queue: deque[ExpertKey] = deque()
        self._in_flight: dict[PendingRead, ExpertKey] = {}
        self._in_flight_length = 0
        self._complete: dict[ExpertKey, None] = {}
        self._cancelled: set[ExpertKey] = set()
        """Those in flight that are discarded when they are complete."""
        self.wasted_length = 0
        """The bytes that were read and discarded at once."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when reads have ended: `advance` is due then."""
        return self._scheduler.queue.fileno()

    def __contains__(self, key: ExpertKey) -> bool:
        """Return whether an expert is complete, or in flight."""
        is_in_flight = key not in self._cancelled and key in self._in_flight.values()
        return key in self._complete or is_in_flight

    def begin(self, keys: Iterable[ExpertKey]) -> None:
        """Read experts, one after another, instead of the queue so far."""
        keys = list(keys)
        self.keep_only(frozenset(keys))
        self._queue.extend(key for key in keys if key not in self)
        self.advance()

    def advance(self, *, wait: bool = False) -> None:
        """Receive complete experts, at least one with `wait`, and begin to read more."""
        for pending in self._scheduler.collect(wait=wait):
            self._end(pending)
        while self._queue and self._in_flight_length < _IN_FLIGHT_LIMIT:
            key = self._queue.popleft()
            into = self._allocate(key)
            (pending,) = self._reader.plan(
                [key], family=ROUTED_FAMILY, into=None if into is None else [into]
            )
            self._in_flight[pending] = key
            self._in_flight_length += self._lengths[key]
            self._scheduler.add([pending])
        self._scheduler.start()

    def _end(self, pending: PendingRead) -> None:
        key = self._in_flight.pop(pending)
        self._in_flight_length -= self._lengths[key]
        is_cancelled = key in self._cancelled
        self._cancelled.discard(key)
        if not is_cancelled and self._is_sound(pending):
            self._receive(key, ExpertBytes(None, pending))
            self._complete[key] = None
        else:
            if pending.error is None:
                self.wasted_length += sum(one.length for one in pending.read.file_reads)
            self._discard([key])

    def _is_sound(self, pending: PendingRead) -> bool:
        try:
            self._reader.finish(pending)
        except MoepackError:
            return False
        return True

    def collect(self, keys: Iterable[ExpertKey]) -> Iterator[ExpertKey]:
        """Yield experts as they are complete, waiting for those in flight."""
        missing = set(keys)
        while missing:
            for key in missing & self._complete.keys():
                missing.remove(key)
                del self._complete[key]
                yield key
            missing = {key for key in missing if key in self}
            if missing and missing.isdisjoint(self._complete):
                self.advance(wait=True)

    def keep_only(self, kept: Container[ExpertKey]) -> None:
        """Empty the queue, and discard all but `kept` now, or when they are complete."""
        self._queue.clear()
        unneeded = [key for key in self._complete if key not in kept]
        for key in unneeded:
            del self._complete[key]
        self._cancelled = {key for key in self._in_flight.values() if key not in kept}
        self._discard(unneeded)

    def close(self) -> None:
        """Wait for reads in flight, and discard everything."""
        self._scheduler.close()
        self._in_flight.clear()
        self._complete.clear()
        self._queue.clear()
