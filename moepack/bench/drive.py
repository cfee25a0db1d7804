"""What a drive can do: throughput by read size, depth and order, past the page cache."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moepack.bench.timed_reads import Clock, Usage, in_flight
from moepack.bench.turns import in_turns
from moepack.reading.expert_read import FileRead
from moepack.storage import page_cache
from moepack.storage.backend import Backend

LENGTHS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 2, 4, 8, 16, 32)
ORDERS = ("random", "sequential")
MOST_TIMES = 4
"""Times as long as planned that the reads of a point in flight may take."""
MAX_IN_FLIGHT = 256 << 20
"""Bytes: deeper queues of large reads gain nothing and need as much memory."""


class Point(NamedTuple):
    """A point of the surface: reads of `length` bytes, `depth` of them in flight, in `order`."""

    length: int
    depth: int
    order: str


def measure(
    backend: Backend,
    files: Sequence[tuple[Path, int]],
    points: Sequence[Point],
    seconds: float,
    progress: Callable[[], None] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[Point, Usage]:
    """Measure each of the `points` on `files` (path, length) for `seconds`.

    Left out are those for which a slow drive would need more than MOST_TIMES that, going by the
    speed of shorter reads. `progress` is called after each.
    """
    usages: dict[Point, Usage] = {}
    speeds: dict[tuple[int, str], float] = {}
    for point in sorted(points):
        speed = speeds.get((point.depth, point.order))
        if speed is None or point.length * point.depth <= speed * seconds * MOST_TIMES:
            reads = spread(files, point.length, point.order)
            usage = in_flight(backend, reads, point.depth, point.length, seconds, clock)
            usages[point] = usage
            speeds[point.depth, point.order] = usage.length / usage.seconds
        if progress is not None:
            progress()
    return {point: usages[point] for point in points if point in usages}


def measure_in_rounds(
    backend: Backend,
    files: Sequence[tuple[Path, int]],
    points: Sequence[Point],
    seconds: float,
    rounds: int,
    progress: Callable[[], None],
) -> dict[Point, list[Usage]]:
    """Measure the `points` in turns, each for its share of the `seconds` in so many `rounds`.

    Each goes on where the one before it left the places to read, so that a drive's own memory helps
    little. What the page cache holds of the files is dropped where the backend reads through it.
    """
    keys = {(point.length, point.order) for point in points}
    reads = {key: spread(files, *key) for key in keys}
    share = seconds / (rounds * len(points))

    def read(point: Point) -> Usage:
        if backend.name == "buffered":
            page_cache.drop(path for path, _ in files)
        key = point.length, point.order
        usage = in_flight(backend, reads[key], point.depth, point.length, share)
        progress()
        return usage

    return in_turns({point: partial(read, point) for point in points}, rounds)


def grid(files: Sequence[tuple[Path, int]]) -> list[Point]:
    """List the points of the surface that can be measured on `files`."""
    longest = max((length for _, length in files), default=0)
    return [
        Point(length, depth, order)
        for length in LENGTHS
        for depth in DEPTHS
        for order in ORDERS
        if length <= longest and length * depth <= MAX_IN_FLIGHT
    ]


def spread(files: Sequence[tuple[Path, int]], length: int, order: str) -> Iterator[FileRead]:
    """Yield reads of `length` for ever: anywhere in the files, or one after another.

    Offsets are multiples of `length`. The random sequence is the same each time.
    """
    places = [(path, size // length) for path, size in files if size >= length]
    if order == "random":
        draw = random.Random(length)
        weights = [count for _, count in places]
        while True:
            path, count = draw.choices(places, weights)[0]
            yield FileRead(path, draw.randrange(count) * length, length, 0)
    while True:
        for path, count in places:
            for number in range(count):
                yield FileRead(path, number * length, length, 0)
