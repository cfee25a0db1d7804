"""Ranges of files read as fast as they come, with what it took: for benchmarks.

Straight through a backend's queue, past all that a Reader adds, or out of memory maps. What is read
goes into scratch memory and is not looked at.
"""

import itertools
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from moepack.errors import MachineError
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest
from moepack.storage.buffers import BufferPool, allocate


class Range(NamedTuple):
    """`length` bytes of the file at `path`, from `offset` on."""

    path: Path
    offset: int
    length: int


class Usage(NamedTuple):
    """What reading took: wall time, CPU time of all threads, reads, and their bytes."""

    seconds: float
    cpu_seconds: float
    read_count: int
    length: int


Ranges = Sequence[Range]
"""Ranges that are known together: the next group's are known when these have been read."""


def through_queue(backend: Backend, groups: Iterable[Ranges], depth: int, longest: int) -> Usage:
    """Read group after group, up to `depth` ranges of up to `longest` bytes in flight at a time.

    Raises MachineError where a range cannot be read whole.
    """
    with _queue(backend, depth, longest) as (queue, buffers), Stopwatch() as watch:
        for group in groups:
            for length in _flow(queue, iter(group), buffers):
                watch.count(length)
    return watch.usage()


def in_flight(
    backend: Backend, ranges: Iterator[Range], depth: int, longest: int, seconds: float
) -> Usage:
    """Keep `depth` of the ranges in flight until they or the `seconds` end."""
    with _queue(backend, depth, longest) as (queue, buffers), Stopwatch() as watch:
        until = itertools.takewhile(lambda _: watch.seconds() < seconds, ranges)
        for length in _flow(queue, until, buffers):
            watch.count(length)
    return watch.usage()


def through_maps(groups: Iterable[Ranges], paths: Iterable[Path], longest: int) -> Usage:
    """Copy group after group out of memory maps of the files, one range after the other."""
    scratch = _touched(allocate(longest))
    with ExitStack() as stack:
        maps = {path: stack.enter_context(_mapped(path)) for path in paths}
        with Stopwatch() as watch:
            for group in groups:
                for path, offset, length in group:
                    scratch[:length] = maps[path][offset : offset + length]
                    watch.count(length)
    return watch.usage()


class Stopwatch:
    """Counts reads and bytes, and the time from entering it to leaving it."""

    def __init__(self) -> None:
        self._read_count = self._length = 0
        self._usage: Usage | None = None

    def __enter__(self) -> Self:
        self._cpu_start = time.process_time()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        cpu = time.process_time() - self._cpu_start
        self._usage = Usage(self.seconds(), cpu, self._read_count, self._length)

    def seconds(self) -> float:
        """Return the seconds since entering."""
        return time.perf_counter() - self._start

    def count(self, length: int) -> None:
        """Count one read."""
        self._read_count += 1
        self._length += length

    def usage(self) -> Usage:
        """Return what was counted until leaving."""
        assert self._usage is not None, "the watch still runs"
        return self._usage


@contextmanager
def _queue(
    backend: Backend, depth: int, longest: int
) -> Iterator[tuple[ReadQueue, list[memoryview]]]:
    """Open a queue, and a buffer for each read in flight."""
    pool = BufferPool(depth, longest)
    buffers = [_touched(memory) for _ in range(depth) if (memory := pool.take(longest)) is not None]
    queue = backend.queue(depth)
    try:
        yield queue, buffers
    finally:
        queue.close()


def _flow(queue: ReadQueue, ranges: Iterator[Range], buffers: list[memoryview]) -> Iterator[int]:
    """Keep as many ranges in flight as there are buffers; yield each one's length as it ends."""
    in_flight: dict[int, Range] = {}
    free = list(range(len(buffers)))
    exhausted = False
    while not exhausted or in_flight:
        begun = []
        while free and not exhausted:
            item = next(ranges, None)
            if item is None:
                exhausted = True
                break
            slot = free.pop()
            in_flight[slot] = item
            begun.append((slot, ReadRequest(item.path, item.offset, buffers[slot][: item.length])))
        if begun:
            queue.start(begun)
        for completion in queue.finished(wait=True):
            item = in_flight.pop(completion.number)
            _check(completion, item)
            free.append(completion.number)
            yield item.length


def _check(completion: Completion, item: Range) -> None:
    place = f"{item.length} bytes at byte {item.offset}"
    if completion.error is not None:
        problem = f"cannot read: {completion.error.strerror}"
        raise MachineError(problem, path=item.path, place=place)
    if completion.length < item.length:
        raise MachineError(
            "the file ends too early", path=item.path, place=place, found=completion.length
        )


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area,
        memoryview(area) as view,
    ):
        yield view


def _touched(memory: memoryview) -> memoryview:
    """Write to each page of new memory, so that no read has to wait for one."""
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 0
    return memory
