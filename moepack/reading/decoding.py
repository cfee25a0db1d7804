"""Parts are decoded in threads, so that whoever takes the ends of reads goes on with these."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from moepack.reading.read_memory import new_memory
from moepack.storage.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moepack.errors import MoepackError
    from moepack.reading.budget import Budget
    from moepack.reading.decoded_read import DecodedRead
    from moepack.reading.expert_read import Memory, ScatteredMemory
    from moepack.reading.locations import PartSpan
    from moepack.storage.arena import Arena

_MAX_THREADS = 8

Decoding = Future["MoepackError | None"]
"""A part that is being decoded; the result is what was wrong with it."""


class Decoder:
    """Decodes the frames that one reader's reads brought; may be used from several threads.

    Its threads begin with the first frame. Errors are counted in `budget`; scratch memory comes
    from `arena`.
    """

    def __init__(self, budget: Budget, arena: Arena) -> None:
        self._budget = budget
        self._arena = arena
        self._pool: ThreadPool | None = None
        self._lock = threading.Lock()

    def scratch(self, read: DecodedRead) -> Memory:
        """Return memory to read frames into. Raises MachineError where there is none."""
        return new_memory(self._arena, read.stored)

    def start(
        self, read: DecodedRead, memory: Memory | ScatteredMemory, scratch: Memory
    ) -> list[Decoding]:
        """Begin to decode what was read. Raises MachineError where no thread can be had."""
        return self._start(read, memory, scratch, read.stored.parts)

    def decode(
        self, read: DecodedRead, memory: Memory | ScatteredMemory, scratch: Memory
    ) -> MoepackError | None:
        """Decode what was read, also in this thread; return what was wrong with it.

        Raises MachineError where no thread can be had.
        """
        first, *others = read.stored.parts
        decodings = self._start(read, memory, scratch, others)
        try:
            errors = [self._decode(read, memory, scratch, first)]
            errors += [decoding.result() for decoding in decodings]
        finally:
            wait(decodings)  # else they would go on writing into memory that is the caller's again
        return next(filter(None, errors), None)

    def close(self) -> None:
        """End the threads; nothing is being decoded any more."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _start(
        self,
        read: DecodedRead,
        memory: Memory | ScatteredMemory,
        scratch: Memory,
        frames: Sequence[PartSpan],
    ) -> list[Decoding]:
        if not frames:
            return []
        with self._lock:
            pool = self._pool = self._pool or ThreadPool(_thread_count(), "moepack-decoding")
        decodings: list[Decoding] = []
        try:
            for frame in frames:
                decodings.append(pool.submit(self._decode, read, memory, scratch, frame))
        except BaseException:
            wait(decodings)
            raise
        return decodings

    def _decode(
        self,
        read: DecodedRead,
        memory: Memory | ScatteredMemory,
        scratch: Memory,
        frame: PartSpan,
    ) -> MoepackError | None:
        error = read.decode(frame, memory, scratch)
        if error is not None:
            self._budget.add_error()
        return error


def _thread_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_THREADS, os.cpu_count() or 1)
