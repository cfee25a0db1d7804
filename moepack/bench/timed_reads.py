"""Experts read as fast as they come, with what it took: through a Reader, a bare queue, or maps.

What is read is not looked at. Whoever compares two layouts gives both the same way, depth and
memory.
"""

import itertools
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from moepack.bench.scratch import Scratch
from moepack.errors import MachineError
from moepack.reading.expert_read import ExpertRead, FileRead
from moepack.reading.reader import Reader
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest

Clock = Callable[[], float]
"""Gives the time in seconds, counted from anywhere."""

Reads = Sequence[FileRead]
"""The reads of one expert, which go into one buffer."""


class Usage(NamedTuple):
    """What reading took: wall time, CPU time of all threads, reads, and their bytes."""

    seconds: float
    cpu_seconds: float
    read_count: int
    length: int


class Stopwatch:
    """Counts reads and bytes, and the time from entering it to leaving it."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._read_count = self._length = 0
        self._usage: Usage | None = None

    def __enter__(self) -> Self:
        self._cpu_start = time.process_time()
        self._start = self._clock()
        return self

    def __exit__(self, *exception: object) -> None:
        seconds = self.seconds()
        cpu = time.process_time() - self._cpu_start
        self._usage = Usage(seconds, cpu, self._read_count, self._length)

    def seconds(self) -> float:
        """Return the seconds since entering."""
        return self._clock() - self._start

    def count(self, length: int) -> None:
        """Count one read."""
        self._read_count += 1
        self._length += length

    def usage(self) -> Usage:
        """Return what was counted until leaving."""
        assert self._usage is not None, "the watch still runs"
        return self._usage


def through_reader(
    reader: Reader, groups: Iterable[Sequence[ExpertRead]], clock: Clock = time.perf_counter
) -> Usage:
    """Read group after group as users do: memory, bounds and digests are the reader's.

    Raises what reading raises.
    """
    with Stopwatch(clock) as watch:
        for group in groups:
            with reader.submit_reads(group) as batch:
                for expert in batch.completions():
                    del expert
            for read in itertools.chain.from_iterable(expert.file_reads for expert in group):
                watch.count(read.length)
    return watch.usage()


def through_queue(
    backend: Backend,
    groups: Iterable[Sequence[Reads]],
    depth: int,
    scratch: Scratch,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Read group after group with a bare backend, up to `depth` reads in flight at a time.

    Each expert takes a buffer of `scratch`, all of them in turn. Raises MachineError where a range
    cannot be read whole.
    """
    free = deque(scratch.buffers)
    with closing(backend.queue(depth)) as queue, Stopwatch(clock) as watch:
        for group in groups:
            for length in _flow(queue, iter(group), depth, free):
                watch.count(length)
    return watch.usage()


def in_flight(
    backend: Backend,
    reads: Iterator[FileRead],
    depth: int,
    longest: int,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Keep `depth` of the `reads`, of up to `longest` bytes, in flight until the `seconds` end.

    One is done at least.
    """
    free = deque(Scratch(depth, longest).buffers)
    with closing(backend.queue(depth)) as queue, Stopwatch(clock) as watch:
        begun = itertools.count()
        until = itertools.takewhile(lambda _: not next(begun) or watch.seconds() < seconds, reads)
        for length in _flow(queue, ((read,) for read in until), depth, free):
            watch.count(length)
    return watch.usage()


def through_maps(
    groups: Iterable[Sequence[Reads]],
    paths: Iterable[Path],
    scratch: Scratch,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Copy group after group out of memory maps of the files, one read after the other."""
    buffers = itertools.cycle(scratch.buffers)
    with ExitStack() as stack:
        maps = {path: stack.enter_context(_mapped(path)) for path in paths}
        with Stopwatch(clock) as watch:
            for expert in itertools.chain.from_iterable(groups):
                buffer = next(buffers)
                for path, offset, length, start in expert:
                    buffer[start : start + length] = maps[path][offset : offset + length]
                    watch.count(length)
    return watch.usage()


def _flow(
    queue: ReadQueue, experts: Iterator[Reads], depth: int, free: deque[memoryview]
) -> Iterator[int]:
    """Keep `depth` reads in flight, as far as buffers are free; yield each one's length at its end.

    The buffer that was free for the longest time is taken next.
    """
    waiting: deque[tuple[FileRead, _Memory]] = deque()
    begun: dict[int, tuple[FileRead, _Memory]] = {}
    numbers = itertools.count()
    while True:
        requests = []
        while len(begun) < depth and (waiting or _open_next(experts, waiting, free)):
            read, memory = step = waiting.popleft()
            number = next(numbers)
            begun[number] = step
            buffer = memory.buffer[read.start : read.start + read.length]
            requests.append((number, ReadRequest(read.path, read.offset, buffer)))
        if requests:
            queue.start(requests)
        if not begun:
            return
        for completion in queue.finished(wait=True):
            read, memory = begun.pop(completion.number)
            _check(completion, read)
            memory.open_count -= 1
            if not memory.open_count:
                free.append(memory.buffer)
            yield read.length


class _Memory:
    """The buffer of one expert, and how many of its reads have not ended."""

    __slots__ = ("buffer", "open_count")

    def __init__(self, buffer: memoryview, open_count: int) -> None:
        self.buffer = buffer
        self.open_count = open_count


def _open_next(
    experts: Iterator[Reads], waiting: deque[tuple[FileRead, _Memory]], free: deque[memoryview]
) -> bool:
    """Give the next expert a buffer and let its reads wait; False where either is lacking."""
    if not free:
        return False
    expert = next(experts, None)
    if expert is None:
        return False
    memory = _Memory(free.popleft(), len(expert))
    waiting.extend([(read, memory) for read in expert])
    return True


def _check(completion: Completion, read: FileRead) -> None:
    place = f"{read.length} bytes at byte {read.offset}"
    if completion.error is not None:
        problem = f"cannot read: {completion.error.strerror}"
        raise MachineError(problem, path=read.path, place=place) from completion.error
    if completion.length < read.length:
        raise MachineError(
            "the file ends too early", path=read.path, place=place, found=completion.length
        )


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        # Unmapped with its last view: the traceback of an error holds one, and would be lost.
        yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
