"""Reads of many experts through one queue: begun in the order asked, within the reader's bounds.

Events of one expert: it waits; it gets memory and its reads begin, as far as the bounds and the
pool allow; the reads end in any order; when the last has ended the expert is finished, with an
error or without. Nothing here blocks but `take` and `close`, and only while something is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.reading.decoded_read import DecodedRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moepack.reading.budget import Budget
    from moepack.reading.decoding import Decoder, Decoding
    from moepack.reading.expert_read import ExpertRead, FileRead, Memory, ScatteredMemory
    from moepack.reading.mirror_use import MirrorUse
    from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest


class PendingRead:
    """One expert on its way: what is read of it, its memory, and what became of it.

    `memory` is None until the first of its reads begins; `given` is the caller's own, if any. Where
    frames are read, into `scratch`, their parts are there after `settle`. All of it comes from one
    place, which is chosen when the first read begins: the mirror where `is_mirrored`.
    """

    __slots__ = (
        *("begun_count", "decodings", "ended_count", "error", "given", "is_mirrored", "memory"),
        *("number", "read", "scratch"),
    )

    def __init__(
        self, number: int, read: ExpertRead, given: Memory | ScatteredMemory | None
    ) -> None:
        self.number = number
        self.read = read
        self.given = given
        self.memory = given if read.frames is None else None
        self.scratch: Memory | None = None
        self.error: MoepackError | None = None
        self.begun_count = self.ended_count = 0
        self.is_mirrored = False
        self.decodings: Sequence[Decoding] = ()

    @property
    def is_decoded(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        return all(decoding.done() for decoding in self.decodings)

    def settle(self) -> None:
        """Wait until all is decoded; may be called again if it is cut off."""
        for decoding in self.decodings:
            self.error = decoding.result() or self.error
        self.decodings = ()
        self.scratch = None


class Scheduler:
    """Feeds one queue; used by one thread at a time.

    `allocate` returns the memory for a read, or None when there is none now. `decoder` is needed
    where parts are stored by a codec, `mirror` where the pack has one that is read as well.
    """

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        allocate: Callable[[ExpertRead], Memory | None],
        decoder: Decoder | None,
        mirror: MirrorUse | None = None,
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._allocate = allocate
        self._decoder = decoder
        self._mirror = mirror
        self._queue: ReadQueue | None = None
        self._waiting: deque[PendingRead] = deque()
        self._started: dict[int, tuple[PendingRead, FileRead]] = {}
        self._failed: list[PendingRead] = []
        self._next_number = 0
        self._looked_at = time.perf_counter()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not (self._waiting or self._started or self._failed)

    def add(self, pending: Iterable[PendingRead]) -> None:
        """Let reads wait for their turn."""
        self._waiting.extend(pending)

    def start(self) -> None:
        """Begin what may begin. Raises MachineError where the backend has no queue to give."""
        waiting, started = self._waiting, self._started
        if not waiting or len(started) >= self._budget.depth:
            return
        queue = self.queue  # first, so that nothing is counted as begun where there is none
        requests: list[tuple[int, ReadRequest]] = []
        while waiting and len(started) < self._budget.depth:
            pending = waiting[0]
            memory = pending.memory or self._memory_for(pending)
            if memory is None:
                if pending.error is None:
                    break
                self._failed.append(waiting.popleft())
                continue
            read = pending.read
            file_read = read.file_reads[pending.begun_count]
            if not self._choose_place(pending):
                break
            if not self._budget.begin(self, file_read.length, force=not started):
                break
            if self._mirror is not None:
                self._mirror.begin(self, file_read.length, is_mirrored=pending.is_mirrored)
            pending.begun_count += 1
            if pending.begun_count == len(read.file_reads):
                waiting.popleft()
            number = self._next_number
            self._next_number = number + 1
            started[number] = (pending, file_read)
            if pending.scratch is not None:
                memory = read.place_in(file_read, memory, pending.scratch)
            request = read.request(file_read, memory)
            if self._mirror is not None and pending.is_mirrored:
                request = self._mirror.redirect(request)
            requests.append((number, request))
        if requests:
            queue.start(requests)

    def _choose_place(self, pending: PendingRead) -> bool:
        """Choose where an expert is read from, with its first read; false if it is to wait."""
        if self._mirror is None or pending.begun_count:
            return True
        is_mirrored = self._mirror.takes(pending.read)
        pending.is_mirrored = bool(is_mirrored)
        return is_mirrored is not None or not self._started

    def take(self, *, wait: bool) -> list[PendingRead]:
        """Take the reads that have finished; with `wait`, and where there are any, at least one.

        Raises RequestError where nothing can begin: the reader is closed, or its pool has no free
        buffer.
        """
        finished: list[PendingRead] = []
        while not self.is_idle:
            self.start()
            finished += self._failed
            self._failed.clear()
            if not self._started:
                if finished or not wait:
                    break
                raise self._cannot_begin()
            self._end_some(finished, wait=wait and not finished)
            if finished or not wait:
                self.start()
                break
        return finished

    @property
    def queue(self) -> ReadQueue:
        """The backend's queue, made when it is first needed."""
        if self._queue is None:
            try:
                self._queue = self._backend.queue(self._budget.depth)
            except OSError as error:
                problem = f"cannot set up {self._backend.name}: {error.strerror}"
                hint = "take what was submitted before submitting more, or use fewer threads"
                raise MachineError(problem, hint=hint) from error
        return self._queue

    def close(self) -> None:
        """Give up what has not begun and wait for the rest; may be called again if it is cut off.

        What was added is nobody's then: whoever added it gives its memory back.
        """
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        self._waiting.clear()
        self._started.clear()
        self._failed.clear()
        self._budget.forget(self)
        if self._mirror is not None:
            self._mirror.forget(self)

    def _cannot_begin(self) -> RequestError:
        if self._budget.is_closed:
            return RequestError("the reader is closed")
        hint = "release what was read before, or make the pool larger"
        return RequestError("all buffers of the pool are taken", hint=hint)

    def _memory_for(self, pending: PendingRead) -> Memory | ScatteredMemory | None:
        """Give a read its memory; None where there is none now, or never: then it has an error."""
        try:
            if isinstance(pending.read, DecodedRead) and pending.scratch is None:
                assert self._decoder is not None
                pending.scratch = self._decoder.scratch(pending.read)
            pending.memory = pending.given or self._allocate(pending.read)
        except MachineError as error:
            pending.error = error
        return pending.memory

    def _finished(self, *, wait: bool) -> tuple[list[Completion], float]:
        """Take the ends of reads that are there, and how many seconds ago nobody had looked yet.

        With `wait` there is at least one. Who has to wait sees it at once.
        """
        looked_at, self._looked_at = self._looked_at, time.perf_counter()
        completions = self.queue.finished(wait=False)
        if completions or not wait:
            return completions, self._looked_at - looked_at
        completions = self.queue.finished(wait=True)
        self._looked_at = time.perf_counter()
        return completions, 0.0

    def _end_some(self, finished: list[PendingRead], *, wait: bool) -> None:
        """Take the ends of reads, and add to `finished` the experts whose last these were."""
        if self._mirror is None:
            self._end(self.queue.finished(wait=wait), finished)
            return
        completions, unseen = self._finished(wait=wait)
        self._end(completions, finished)
        self._mirror.measure(unseen)

    def _end(self, completions: list[Completion], finished: list[PendingRead]) -> None:
        """Take the ends of reads, and add to `finished` the experts whose last these were."""
        length = received = errors = 0
        for number, got, error in completions:
            pending, file_read = self._started.pop(number)
            read = pending.read
            memory = pending.memory
            assert memory is not None
            if pending.scratch is not None:
                memory = read.place_in(file_read, memory, pending.scratch)
            length += file_read.length
            own = read.received(file_read, memory, got)
            received += own
            problem = read.problem(file_read, own, error)
            if self._mirror is not None:
                is_mirrored = pending.is_mirrored
                self._mirror.end(self, file_read.length, own, is_mirrored=is_mirrored)
            if problem is not None:
                errors += not pending.is_mirrored  # which is read again, from its first place
                if self._mirror is not None and pending.is_mirrored:
                    self._mirror.retire(problem)
                pending.error = pending.error or problem
            pending.ended_count += 1
            if pending.ended_count == len(read.file_reads):
                if read.frames is not None:
                    self._decode(pending)
                finished.append(pending)
        if completions:
            self._budget.end(self, len(completions), length, received, errors)

    def _decode(self, pending: PendingRead) -> None:
        """Begin to decode what was read, if it came."""
        if pending.error is not None:
            return
        read, memory, scratch = pending.read, pending.memory, pending.scratch
        assert isinstance(read, DecodedRead)
        assert memory is not None
        assert scratch is not None
        assert self._decoder is not None
        try:
            pending.decodings = self._decoder.start(read, memory, scratch)
        except MachineError as error:
            pending.error = error
