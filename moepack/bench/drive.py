"""The throughput of a drive by read size, depth and order, past the page cache."""

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Not `np.random`, which numpy imports only when it is first used: Cython modules clear errors while
# they begin, so that an interruption then would be lost.
from numpy.random import SFC64

from moepack.common.errors import MachineError, RequestError, write_failure
from moepack.common.sizes import align, exact_size_text
from moepack.pack.reading.expert_read import FileRead
from moepack.storage import page_cache
from moepack.storage.backend import Backend, Completion, ReadRequest
from moepack.storage.buffers import allocate_huge
from moepack.storage.folders import free_space

LENGTHS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 2, 4, 8, 16, 32)
ORDERS = ("random", "sequential")
MAX_IN_FLIGHT = 256 << 20
"""Bytes: deeper queues of large reads gain nothing and need as much memory."""

_PIECE = 16 << 20
_HUGE_PAGE = 2 << 20
LEAST_LENGTH = 16 * _PIECE
"""Bytes of a scratch file: too much of a shorter one lies in the drive's own memory."""


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
        """Return the CPU seconds for each GiB of `useful_length` bytes."""
        return self.cpu_seconds / (useful_length / (1 << 30))


class Point(NamedTuple):
    """A point of the surface: reads of `length` bytes in `order`, `depth` at a time."""

    length: int
    depth: int
    order: str


@dataclass(frozen=True, slots=True)
class SurfacePoint:
    """The speed of a drive at reads of `length` bytes in `order`, `depth` at a time."""

    length: int
    depth: int
    order: str
    bytes_per_second: float
    cpu_seconds_per_gib: float
    read_count: int


def measure(
    backend: Backend,
    files: Sequence[tuple[Path, int]],
    points: Sequence[Point],
    seconds: float,
    progress: Callable[[], None] = lambda: None,
) -> tuple[SurfacePoint, ...]:
    """Measure each of the `points` on `files` (path, length) for `seconds`.

    `progress` is called after each.
    """
    measured = []
    for point in points:
        reads = read_ranges(files, point.length, point.order)
        usage = in_flight(backend, reads, point.depth, point.length, seconds)
        cpu = usage.cpu_seconds_per_gib(usage.length)
        measured.append(SurfacePoint(*point, usage.bytes_per_second, cpu, usage.read_count))
        progress()
    return tuple(measured)


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


def read_ranges(files: Sequence[tuple[Path, int]], length: int, order: str) -> Iterator[FileRead]:
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


def in_flight(
    backend: Backend, reads: Iterator[FileRead], depth: int, longest: int, seconds: float
) -> Usage:
    """Keep `depth` of the `reads`, of up to `longest` bytes, in flight until the `seconds` end.

    At least one is done. Raises MachineError for a range that cannot be read whole.
    """
    buffers = _buffers(depth, longest)
    free = deque(range(depth))
    begun: dict[int, FileRead] = {}
    read_count = length = 0
    with closing(backend.queue(depth)) as queue:
        cpu_start, start = time.process_time(), time.perf_counter()
        later = itertools.takewhile(lambda _: time.perf_counter() < start + seconds, reads)
        due = itertools.chain(itertools.islice(reads, 1), later)
        while True:
            requests = []
            for read in itertools.islice(due, len(free)):
                number = free.popleft()
                begun[number] = read
                buffer = buffers[number][: read.length]
                requests.append((number, ReadRequest(read.path, read.offset, buffer)))
            if requests:
                queue.start(requests)
            if not begun:
                break
            for completion in queue.finished(wait=True):
                read = begun.pop(completion.number)
                _check(completion, read)
                free.append(completion.number)
                read_count += 1
                length += read.length
        duration = time.perf_counter() - start
        return Usage(duration, time.process_time() - cpu_start, read_count, length)


def _buffers(count: int, length: int) -> list[memoryview]:
    """Return buffers that begin on pages, in huge pages if the system has them.

    A read into small pages takes the kernel several times as long, and one into pages that were
    never written to longer still.
    """
    stride = align(length, mmap.PAGESIZE)
    total = align(count * stride, _HUGE_PAGE)
    area = allocate_huge(total + _HUGE_PAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE
    memory = memoryview(area)[first : first + total]
    for at in range(0, total, mmap.PAGESIZE):
        memory[at] = 0
    return [memory[n * stride :][:length] for n in range(count)]


def _check(completion: Completion, read: FileRead) -> None:
    place = f"{read.length} bytes at byte {read.offset}"
    if completion.error is not None:
        problem = f"cannot read: {completion.error.strerror}"
        raise MachineError(problem, path=read.path, place=place) from completion.error
    if completion.length < read.length:
        raise MachineError(
            "the file ends too early", path=read.path, place=place, found=completion.length
        )


@contextlib.contextmanager
def scratch_file(
    directory: Path,
    length: int,
    progress: Callable[[], None] = lambda: None,
    head: Callable[[int], bytes] = lambda _: b"",
) -> Iterator[Path]:
    """Yield a file of `length` random bytes in `directory`, on the drive and not in the page cache.

    It begins with the `head` of a file that long. It takes at most half of the free space, and is
    removed at the end of the block. Raises RequestError for a missing folder, MachineError if it
    cannot be written.
    """
    if not directory.is_dir():
        raise RequestError("no such folder", path=directory, hint="make it, or choose another")
    least, room = min(length, LEAST_LENGTH), free_space(directory) // 2
    if room < least:
        raise MachineError(
            "not enough space for a file to read from",
            path=directory,
            expected=f"{exact_size_text(2 * least)} free",
            found=exact_size_text(2 * room),
            hint="free some, choose another `directory`, or name a model on the drive",
        )
    with temporary_path(directory) as path:
        try:
            with open(path, "xb") as file:
                draw, length = SFC64(), min(length, room)
                for start in range(0, length, _PIECE):
                    # Random, so that no drive can store it in less.
                    file.write(draw.random_raw(_PIECE // 8).tobytes()[: length - start])
                    progress()
                file.seek(0)
                file.write(head(length))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failure(error, directory) from None
        page_cache.drop([path])
        yield path


@contextlib.contextmanager
def temporary_path(directory: Path) -> Iterator[Path]:
    """Yield a free path in `directory`; a file that is made there is removed at the end.

    The path comes before the file, so that an interruption finds it whenever it comes.
    """
    path = directory / f"moepack-scratch-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
