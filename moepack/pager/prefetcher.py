"""Reads experts before they are chosen, while programs compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from moepack.errors import MoepackError
from moepack.keys import ExpertKey
from moepack.reading.batch import ExpertBytes
from moepack.reading.reader import Reader
from moepack.reading.scheduler import PendingRead
from moepack.shape import ROUTED_FAMILY

_WINDOW = 64 << 20
"""Bytes that are in flight at once: what is demanded meanwhile waits for these at most."""

Buffers = Mapping[str, memoryview]
"""By the name of a part, where it is read to."""


class Prefetcher:
    """Experts that are wanted, in flight or have come, and that nobody has taken yet.

    `lengths` are the bytes of each. `allocate` gives where an expert is read to, None where that is
    memory of the reader's, which `receive` gets when it has come; `discard` frees what nobody took.
    What cannot be read is discarded: who demands it meets the error.
    """

    def __init__(
        self,
        reader: Reader,
        lengths: Mapping[ExpertKey, int],
        allocate: Callable[[ExpertKey], Buffers | None],
        receive: Callable[[ExpertKey, ExpertBytes], None],
        discard: Callable[[Iterable[ExpertKey]], None],
    ) -> None:
        self._reader = reader
        self._lengths = lengths
        self._allocate, self._receive, self._discard = allocate, receive, discard
        self._scheduler = reader.scheduler()
        self._wanted: deque[ExpertKey] = deque()
        self._in_flight: dict[PendingRead, ExpertKey] = {}
        self._in_flight_length = 0
        self._come: dict[ExpertKey, None] = {}
        self._unwanted: set[ExpertKey] = set()
        """Of those in flight, what is discarded when it comes."""
        self.wasted_length = 0
        """The bytes of what came and was discarded at once."""

    def fileno(self) -> int:
        """Return what is readable when reads have ended: `advance` is due then."""
        return self._scheduler.queue.fileno()

    def __contains__(self, key: ExpertKey) -> bool:
        """Return whether an expert has come, or is in flight."""
        return key in self._come or self._is_in_flight(key)

    def _is_in_flight(self, key: ExpertKey) -> bool:
        return key not in self._unwanted and key in self._in_flight.values()

    def begin(self, keys: Iterable[ExpertKey]) -> None:
        """Read experts, one after another, instead of those that were wanted before."""
        keys = list(keys)
        self.keep_only(frozenset(keys))
        self._wanted.extend(key for key in keys if key not in self)
        self.advance()

    def advance(self, *, wait: bool = False) -> None:
        """Receive what has come, and begin to read more; with `wait`, one at least comes."""
        for pending in self._scheduler.take(wait=wait):
            self._end(pending)
        while self._wanted and self._in_flight_length < _WINDOW:
            key = self._wanted.popleft()
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
        pending.settle()  # what is discarded may be decoded into its slot yet
        is_wanted = key not in self._unwanted
        self._unwanted.discard(key)
        if is_wanted and self._is_sound(pending):
            self._receive(key, ExpertBytes(None, pending))
            self._come[key] = None
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

    def take(self, keys: Iterable[ExpertKey]) -> Iterator[ExpertKey]:
        """Wait for experts that are in flight, and yield each that has come, as it comes."""
        missing = set(keys)
        while missing:
            for key in missing & self._come.keys():
                missing.remove(key)
                del self._come[key]
                yield key
            missing = {key for key in missing if key in self}
            if missing and missing.isdisjoint(self._come):
                self.advance(wait=True)

    def keep_only(self, kept: Container[ExpertKey]) -> None:
        """Want nothing more but `kept` of what is read; discard the rest, or when it has come."""
        self._wanted.clear()
        unneeded = [key for key in self._come if key not in kept]
        for key in unneeded:
            del self._come[key]
        self._unwanted = {key for key in self._in_flight.values() if key not in kept}
        self._discard(unneeded)

    def close(self) -> None:
        """Wait for what is in flight, and discard it all."""
        self._scheduler.close()
        self._in_flight.clear()
        self._come.clear()
        self._wanted.clear()
