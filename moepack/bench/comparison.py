"""Layouts compared in paired rounds, each read in all the ways that there are.

A verdict takes a number of rounds, and a slow drive does few of them with portions that a fast one
needs to be timed at all. So a short trial comes first, from which time and sizes follow. Results
have no influence on the time, or they would be biased.

Of the ways `reader` is moepack's Reader as users get it: its own memory, digests checked. `raw` is
the bare backend with buffers that are used again. `mapped` copies out of memory maps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from moepack.bench import layouts, rounds
from moepack.bench.disturbance import Disturbance
from moepack.bench.layouts import Groups, Portion
from moepack.bench.measuring import Clock, Meter
from moepack.bench.rounds import Condition, Measurement, Round
from moepack.bench.timed_reads import (
    HUGE_PAGE,
    Scratch,
    Usage,
    through_maps,
    through_queue,
    through_reader,
)
from moepack.bench.verdict import MIN_ROUNDS, STRETCHES
from moepack.common.sizes import align
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.storage import page_cache
from moepack.storage.backend import Backend
from moepack.storage.threaded import ThreadedBackend

USUAL_SECONDS = 45.0
MAX_SECONDS = 600.0
"""The longest time by default, on drives that are too slow for a verdict in USUAL_SECONDS."""

ROUNDS = 4 * STRETCHES
"""The rounds that sizes are chosen for: with several in each stretch an outlier moves none."""

PORTION_LENGTH = 16 << 20
"""Bytes of blobs that are read in one go if there is time: long enough to be timed well."""

WARM_UP_SHARE = 0.2
"""The time for reading everything once, as a share of the time for the rounds."""

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


class Schedule(NamedTuple):
    """A plan: some `round_count` rounds in so many `seconds`.

    A round reads portions of `portion_length` bytes of blobs, in the mean; `sizes` are the routed
    layers in each. `needed_seconds` are the least in which a verdict can be expected.
    """

    seconds: float
    round_count: int
    portion_length: int
    sizes: list[int]
    needed_seconds: float

    @property
    def total_seconds(self) -> float:
        """About how long the comparison takes; at most twice that if others disturb it."""
        return self.seconds * (1 + WARM_UP_SHARE)


def schedule(layer_seconds: float, lengths: Sequence[int], seconds: float | None) -> Schedule:
    """Choose sizes and time for rounds that take `layer_seconds` for one routed layer.

    `lengths` are the bytes of the blobs of each routed layer. The default for `seconds` is as many
    as a verdict takes, from USUAL_SECONDS to MAX_SECONDS, and USUAL_SECONDS if it takes more.
    """
    needed = MIN_ROUNDS * layer_seconds
    if seconds is None:
        seconds = needed if USUAL_SECONDS < needed <= MAX_SECONDS else USUAL_SECONDS
    most = max(1, int(seconds / ROUNDS / max(layer_seconds, 1e-9)))
    sizes = cut(lengths, most)
    round_seconds = layer_seconds * len(lengths) / len(sizes)
    round_count = max(1, int(seconds / max(round_seconds, 1e-9)))
    return Schedule(seconds, round_count, sum(lengths) // len(sizes), sizes, needed)


def cut(lengths: Sequence[int], most: int) -> list[int]:
    """Cut routed layers into portions of PORTION_LENGTH, or of `most` layers; return their sizes.

    A short rest at the end goes to the last portion.
    """
    sizes: list[int] = []
    count = total = 0
    for length in lengths:
        count += 1
        total += length
        if total >= PORTION_LENGTH or count == most:
            sizes.append(count)
            count = total = 0
    if not sizes:
        return [count]
    sizes[-1] += count
    return sizes


class Rig(NamedTuple):
    """The clock and backends of a comparison: real ones, or those of a simulated drive.

    `make_backend` makes a backend for queues of so many reads; `disturbance` returns that since its
    last call.
    """

    make_backend: Callable[[int], Backend]
    clock: Clock
    disturbance: Callable[[], Disturbance]


class Comparison(NamedTuple):
    """The rounds, their conditions, and the portions that were read.

    `was_cold` is None if the system does not report what is cached.
    """

    schedule: Schedule
    portions: Mapping[str, Sequence[Portion]]
    conditions: Sequence[Condition]
    rounds: Sequence[Round]
    was_cold: bool | None
    buffers: RawBuffers


def compare(
    pack: Pack,
    groups: Mapping[str, Groups],
    rig: Rig,
    depths: Sequence[int],
    seconds: float | None,
    meter: Meter,
    announce: Callable[[Schedule], None] | None = None,
) -> Comparison:
    """Read the same experts in all layouts, in rounds, until their time is over.

    That is `seconds`, or as `schedule` chooses; `announce` is called before. Raises what opening
    and reading raise.
    """
    plan = rounds.plan_of(depths, tuple(groups))
    make_backend, clock, disturbance = rig
    count = len(groups["blobs"])
    single = _portions(groups, [1] * count)
    with open_ways(pack, make_backend, depths, single, clock) as ways:
        layer_seconds = rounds.try_out(_reads(ways, single), plan, count, clock)
        lengths = [_length(portion) for portion in single["blobs"]]
        chosen = schedule(layer_seconds, lengths, seconds)
        if announce is not None:
            announce(chosen)
        portions = _portions(groups, chosen.sizes)
        count = ways.warm_up(portions, WARM_UP_SHARE * chosen.seconds)
        portions = {layout: several[:count] for layout, several in portions.items()}
        meter.begin(chosen.seconds)
        disturbance()
        done = rounds.measure(_reads(ways, portions), plan, count, meter, clock, disturbance)
        return Comparison(chosen, portions, plan.conditions, done, ways.was_cold, ways.buffers)


def _portions(groups: Mapping[str, Groups], sizes: Sequence[int]) -> dict[str, list[Portion]]:
    return {layout: layouts.portions(several, sizes) for layout, several in groups.items()}


def _reads(
    ways: Ways, portions: Mapping[str, Sequence[Portion]]
) -> Callable[[Measurement, int], Usage]:
    return lambda measurement, number: ways.read(measurement, portions[measurement.layout][number])


def _length(portion: Portion) -> int:
    experts = (expert for group in portion.groups for expert in group)
    return sum(read.length for expert in experts for read in expert.file_reads)
