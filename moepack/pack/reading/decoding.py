"""Decoding of parts in threads, beside the thread that takes the ends of reads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from moepack.common.errors import MachineError, PackError
from moepack.pack.reading.expert_read import new_memory
from moepack.storage.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moepack.common.errors import MoepackError
    from moepack.pack.reading.expert_read import AnyMemory, ExpertRead, ReadMemory
    from moepack.pack.reading.in_flight import InFlight
    from moepack.pack.reading.locations import PartSpan
    from moepack.storage.arena import Arena

_MAX_THREADS = 8

Decoding = Future["MoepackError | None"]
"""A part that is being decoded; the result is its error, None for a sound part."""


class Decoder:
    """Decodes the frames that one reader's reads brought; may be used from several threads.

    Its threads begin with the first frame. Errors are counted in `in_flight`, except those of the
    mirror; scratch memory comes from `arena`. Its methods are for reads with frames alone.
    """

    def __init__(self, in_flight: InFlight, arena: Arena) -> None:
        self._in_flight = in_flight
        self._arena = arena
        self._pool: ThreadPool | None = None
        self._lock = threading.Lock()

    def scratch(self, read: ExpertRead) -> ReadMemory:
        """Return memory to read frames into. Raises MachineError if there is none."""
        return new_memory(self._arena, _frames(read))

    def start(
        self, read: ExpertRead, memory: AnyMemory, scratch: ReadMemory, *, is_mirrored: bool
    ) -> list[Decoding]:
        """Begin to decode an expert from `scratch` to `memory`.

        Raises MachineError if no thread can be started.
        """
        decode = partial(self._decode, read, memory, scratch, is_mirrored)
        return self._start(decode, _frames(read).parts)

    def decode(
        self, read: ExpertRead, memory: AnyMemory, scratch: ReadMemory, *, is_mirrored: bool
    ) -> MoepackError | None:
        """Decode an expert, also in this thread; return the first error.

        Raises MachineError if no thread can be started.
        """
        decode = partial(self._decode, read, memory, scratch, is_mirrored)
        first, *others = _frames(read).parts
        decodings = self._start(decode, others)
        try:
            errors = [decode(first)]
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
        self, decode: Callable[[PartSpan], MoepackError | None], frames: Sequence[PartSpan]
    ) -> list[Decoding]:
        if not frames:
            return []
        with self._lock:
            pool = self._pool = self._pool or ThreadPool(_thread_count(), "moepack-decoding")
        decodings: list[Decoding] = []
        try:
            for frame in frames:
                decodings.append(pool.submit(decode, frame))
        except BaseException:
            wait(decodings)
            raise
        return decodings

    def _decode(
        self,
        read: ExpertRead,
        memory: AnyMemory,
        scratch: ReadMemory,
        is_mirrored: bool,
        frame: PartSpan,
    ) -> MoepackError | None:
        """Return the error, since the traceback of a raised one would hold the memory."""
        from moepack.storage.frames import FrameError, decompress_into

        path, place = read.place_of(frame)
        problem: MoepackError
        try:
            decompress_into(scratch.part(frame), memory.part(read.part(frame.name)))
            return None
        except FrameError as error:
            problem = PackError(
                f"the part cannot be decoded: {error}",
                path=path,
                place=place,
                hint="run `moepack verify` on the pack",
            )
        except MemoryError:
            problem = MachineError("no memory is left to decode the part", path=path, place=place)
        if not is_mirrored:  # else it is read again, from the pack
            self._in_flight.add_error()
        return problem


def _frames(read: ExpertRead) -> ExpertRead:
    assert read.frames is not None
    return read.frames


def _thread_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_THREADS, os.cpu_count() or 1)
