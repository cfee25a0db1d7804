"""The ways to read that are compared, with their readers, backend and buffers.

`reader` is moepack's Reader as users get it: its own memory, digests checked. `raw` is the bare
backend with buffers that are used again. `mapped` copies out of memory maps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from moepack.bench.layouts import Portion
from moepack.bench.measuring import Clock
from moepack.bench.rounds import Measurement
from moepack.bench.timed_reads import (
    HUGE_PAGE,
    Scratch,
    Usage,
    through_maps,
    through_queue,
    through_reader,
)
from moepack.common.sizes import align
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.storage import page_cache
from moepack.storage.backend import Backend
from moepack.storage.threaded import ThreadedBackend

COLD_ENOUGH = 0.01
"""The share of the bytes to read that may stay cached: file systems keep a few pages."""

WARMING_DEPTH = 4
"""Reads in flight that fill the page cache."""


@dataclass(frozen=True, slots=True)
class RawBuffers:
    """The buffers of the raw and mapped ways, the same for all layouts.

    `huge_page_share` is None if the system does not report it.
    """

    count: int
    length: int
    huge_page_share: float | None


class Ways:
    """Reads portions of layouts, with everything the same for all layouts.

    `smallest` are the portions of each layout with one routed layer each.
    """

    def __init__(
        self,
        backend: Backend,
        warming: Backend,
        readers: Mapping[int, Reader],
        smallest: Mapping[str, Sequence[Portion]],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._warming = warming
        self._readers = readers
        self._clock = clock
        self._cached_shares: dict[Measurement, float | None] = {}
        every = [portion for several in smallest.values() for portion in several]
        self._cached = {path for portion in every for path in portion.paths}
        count = min(max(readers), max(len(group) for one in every for group in one.groups))
        longest = max(portion.longest for portion in every)
        self._scratch = Scratch(count, align(longest, HUGE_PAGE))

    @property
    def buffers(self) -> RawBuffers:
        """The memory of the raw way."""
        scratch = self._scratch
        return RawBuffers(scratch.count, scratch.length, scratch.huge_page_share())

    @property
    def was_cold(self) -> bool | None:
        """Whether all that was to be cold was; None if the system does not report it."""
        shares = [share for share in self._cached_shares.values() if share is not None]
        if not shares or len(shares) < len(self._cached_shares):
            return None
        return max(shares) <= COLD_ENOUGH

    def warm_up(self, portions: Mapping[str, Sequence[Portion]], seconds: float) -> int:
        """Read portions once, so that caches that nobody can drop hold all layouts alike.

        Returns the number of portions of each layout that there was time for, at least one.
        """
        start = self._clock()
        rows = list(zip(*portions.values(), strict=True))
        for number, row in enumerate(rows):
            if number and self._clock() - start > seconds:
                return number
            for portion in row:
                through_queue(self._backend, portion.rounded, max(self._readers), self._scratch)
        return len(rows)

    def read(self, measurement: Measurement, portion: Portion) -> Usage:
        """Warm or empty the page cache as the condition says, then read a portion."""
        _, (way, state, depth) = measurement
        if state == "warm":
            through_queue(self._warming, portion.rounded, WARMING_DEPTH, self._scratch)
        else:
            self._make_cold(portion)
            if measurement not in self._cached_shares:
                self._cached_shares[measurement] = _cached_share(portion)
        if state == "warm" or way == "mapped" or self._backend.name == "buffered":
            self._cached.update(portion.paths)
        if way == "reader":
            return through_reader(self._readers[depth], portion.groups, self._clock)
        if way == "raw":
            return through_queue(self._backend, portion.rounded, depth, self._scratch, self._clock)
        return through_maps(portion.exact, portion.paths, self._scratch, self._clock)

    def _make_cold(self, portion: Portion) -> None:
        """Drop only files that may be cached: dropping syncs them, which takes long."""
        paths = self._cached.intersection(portion.paths)
        page_cache.drop(paths)
        self._cached -= paths


def _cached_share(portion: Portion) -> float | None:
    """Return the cached bytes of the portion's files, as a share of the bytes to read."""
    share = page_cache.cached_share(portion.paths)
    if share is None:
        return None
    reads = (read for group in portion.rounded for expert in group for read in expert)
    stored = sum(path.stat().st_size for path in portion.paths)
    return share * stored / sum(read.length for read in reads)


@contextmanager
def open_ways(
    pack: Pack,
    make_backend: Callable[[int], Backend],
    depths: Sequence[int],
    smallest: Mapping[str, Sequence[Portion]],
    clock: Clock = time.perf_counter,
) -> Iterator[Ways]:
    """Open a reader with a backend of its own for each of the `depths`.

    `smallest` are as in `Ways`.
    """
    with ExitStack() as stack:
        readers = {
            # Layouts are compared on one drive; the other ways have no mirror.
            depth: stack.enter_context(
                pack.reader(backend=make_backend(depth), depth=depth, mirror=False)
            )
            for depth in depths
        }
        backend = stack.enter_context(closing(make_backend(max(depths))))
        warming = stack.enter_context(closing(ThreadedBackend(direct=False)))
        yield Ways(backend, warming, readers, smallest, clock)
