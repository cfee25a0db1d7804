"""Experts read as fast as they come, and timed: through a Reader, a bare queue, or memory maps.

Whoever compares two layouts gives both the same way, depth and memory.
"""

import ctypes
import itertools
import mmap
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from moepack.bench.measuring import Clock
from moepack.common.errors import MachineError
from moepack.common.sizes import align
from moepack.pack.reading.expert_read import ExpertRead, FileRead
from moepack.pack.reading.reader import Reader
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest
from moepack.storage.buffers import allocate_huge
from moepack.storage.regular_file import open_regular

Reads = Sequence[FileRead]
"""The reads of one expert, which go into one buffer."""

HUGE_PAGE = 2 << 20
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ")


class Usage(NamedTuple):
    """Wall time, CPU time of all threads, the number of reads, and their bytes."""

    seconds: float
    cpu_seconds: float
    read_count: int
    length: int

    @property
    def bytes_per_second(self) -> float:
        """The bytes read in a second."""
        return self.length / self.seconds

    def cpu_seconds_per_gib(self, useful_length: int) -> float:
        """Return the CPU time for each GiB of so many useful bytes."""
        return self.cpu_seconds / (useful_length / (1 << 30))


def _timed(lengths: Iterable[int], clock: Clock) -> Usage:
    """Take the lengths of reads as they end; return their sums, and the time that they took."""
    cpu_start, start = time.process_time(), clock()
    read_count = total = 0
    for length in lengths:
        read_count += 1
        total += length
    seconds = clock() - start
    return Usage(seconds, time.process_time() - cpu_start, read_count, total)


class Scratch:
    """`count` buffers of `length` bytes, rounded up to pages, for all sides of a comparison.

    They lie in one anonymous, private mapping. A read into small pages takes the kernel several
    times as long as one into huge pages, so the system is asked for huge ones, and each page is
    written to before anything is read into it. Raises MachineError for a lack of memory.
    """

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, align(length, mmap.PAGESIZE)
        total = align(count * self.length, HUGE_PAGE)
        area = allocate_huge(total + HUGE_PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._start = align(first, HUGE_PAGE)
        self._end = self._start + total
        memory = memoryview(area)[self._start - first :][:total]
        for at in range(0, total, mmap.PAGESIZE):
            memory[at] = 0
        self.buffers = [memory[n * self.length :][: self.length] for n in range(count)]

    def huge_page_share(self) -> float | None:
        """Return the share of the buffers in huge pages; None if the system does not report it.

        By `AnonHugePages` in /proc/self/smaps (proc_pid_smaps(5)).
        """
        try:
            lines = Path("/proc/self/smaps").read_bytes().splitlines()
        except OSError:
            return None
        huge = inside = 0
        for line in lines:
            if match := _MAPPING.match(line):
                start, end = (int(text, 16) for text in match.groups())
                inside = min(end, self._end) - max(start, self._start)
            elif inside > 0 and line.startswith(b"AnonHugePages:"):
                # A mapping may be joined with its neighbours, which are not ours.
                huge += min(int(line.split()[1]) << 10, inside)
        return huge / (self._end - self._start)


def through_reader(
    reader: Reader, groups: Iterable[Sequence[ExpertRead]], clock: Clock = time.perf_counter
) -> Usage:
    """Read group after group as users do: memory, bounds and digests are the reader's.

    Raises what reading raises.
    """

    def lengths() -> Iterator[int]:
        for group in groups:
            with reader.submit_reads(group) as batch:
                for expert in batch.completions():
                    del expert
            for read in group:
                yield from (part.length for part in read.file_reads)

    return _timed(lengths(), clock)


def through_queue(
    backend: Backend,
    groups: Iterable[Sequence[Reads]],
    depth: int,
    scratch: Scratch,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Read group after group with a bare backend, up to `depth` reads in flight at a time.

    Each expert takes a buffer of `scratch`, all of them in turn. Raises MachineError for a range
    that cannot be read whole.
    """
    free = deque(scratch.buffers)
    with closing(backend.queue(depth)) as queue:
        flows = (_flow(queue, iter(group), depth, free) for group in groups)
        return _timed(itertools.chain.from_iterable(flows), clock)


def in_flight(
    backend: Backend,
    reads: Iterator[FileRead],
    depth: int,
    longest: int,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Keep `depth` of the `reads`, of up to `longest` bytes, in flight until the `seconds` end.

    At least one is done.
    """
    free = deque(Scratch(depth, longest).buffers)
    with closing(backend.queue(depth)) as queue:
        end = clock() + seconds
        later = itertools.takewhile(lambda _: clock() < end, reads)
        some = itertools.chain(itertools.islice(reads, 1), later)
        return _timed(_flow(queue, ((read,) for read in some), depth, free), clock)


def through_maps(
    groups: Iterable[Sequence[Reads]],
    paths: Iterable[Path],
    scratch: Scratch,
    clock: Clock = time.perf_counter,
) -> Usage:
    """Copy group after group out of memory maps of the files, one read after the other."""
    buffers = itertools.cycle(scratch.buffers)
    maps = {path: _mapped(path) for path in paths}

    def lengths() -> Iterator[int]:
        for expert in itertools.chain.from_iterable(groups):
            buffer = next(buffers)
            for path, offset, length, start in expert:
                buffer[start : start + length] = maps[path][offset : offset + length]
                yield length

    return _timed(lengths(), clock)


def _flow(
    queue: ReadQueue, experts: Iterator[Reads], depth: int, free: deque[memoryview]
) -> Iterator[int]:
    """Keep `depth` reads in flight, as buffers are free; yield the length of each at its end.

    The buffer that was free for the longest time is used next.
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
    """The buffer of one expert, and the number of its reads that have not ended."""

    __slots__ = ("buffer", "open_count")

    def __init__(self, buffer: memoryview, open_count: int) -> None:
        self.buffer = buffer
        self.open_count = open_count


def _open_next(
    experts: Iterator[Reads], waiting: deque[tuple[FileRead, _Memory]], free: deque[memoryview]
) -> bool:
    """Give the next expert a buffer and queue its reads; return False if either is lacking."""
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


def _mapped(path: Path) -> memoryview:
    with open(path, "rb", opener=open_regular) as file:
        # Unmapped with its last view: the traceback of an error holds one, and would be lost.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
