"""Reads of a bare backend, timed."""

import ctypes
import itertools
import mmap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from moepack.common.errors import MachineError
from moepack.common.sizes import align
from moepack.pack.reading.expert_read import FileRead
from moepack.storage.backend import Backend, Completion, ReadRequest
from moepack.storage.buffers import allocate_huge

_HUGE_PAGE = 2 << 20


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
