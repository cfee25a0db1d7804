"""Reads of many experts through one queue: begun in the order asked, within the reader's bounds.

Events of one expert: it waits; it gets memory and its reads begin, as far as the bounds and the
pool allow; the reads end in any order; when the last has ended the expert is finished, with an
error or without. Nothing here blocks but `take` and `close`, and only while something is in flight.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.reading.budget import Budget
from moepack.reading.expert_read import ExpertRead, FileRead
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest


class PendingRead:
    """One expert on its way: what is read of it, its memory, and what became of it.

    `memory` is None until the first of its reads begins.
    """

    __slots__ = ("error", "memory", "number", "open_count", "read")

    def __init__(self, number: int, read: ExpertRead, memory: memoryview | None) -> None:
        self.number = number
        self.read = read
        self.memory = memory
        self.error: MoepackError | None = None
        self.open_count = len(read.file_reads)


class _Step(NamedTuple):
    pending: PendingRead
    file_read: FileRead


class Scheduler:
    """Feeds one queue; used by one thread at a time.

    `allocate` returns the memory for a read, or None when there is none now.
    """

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        allocate: Callable[[ExpertRead], memoryview | None],
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._allocate = allocate
        self._queue: ReadQueue | None = None
        self._waiting: deque[_Step] = deque()
        self._started: dict[int, _Step] = {}
        self._failed: list[PendingRead] = []
        self._next_number = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not (self._waiting or self._started or self._failed)

    def add(self, pending: PendingRead) -> None:
        """Let a read wait for its turn."""
        self._waiting.extend([_Step(pending, file_read) for file_read in pending.read.file_reads])

    def start(self) -> None:
        """Begin what may begin. Raises MachineError where the backend has no queue to give."""
        if not self._waiting:
            return
        queue = self.queue  # first, so that nothing is counted as begun where there is none
        requests: list[tuple[int, ReadRequest]] = []
        while self._waiting and self._begin(self._waiting[0]):
            step = self._waiting.popleft()
            if step.pending.memory is None:
                self._failed.append(step.pending)
            else:
                requests.append(self._request(step, step.pending.memory))
        if requests:
            queue.start(requests)

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
            for completion in self.queue.finished(wait=wait and not finished):
                pending = self._end(completion)
                if pending is not None:
                    finished.append(pending)
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

    def _cannot_begin(self) -> RequestError:
        if self._budget.is_closed:
            return RequestError("the reader is closed")
        hint = "release what was read before, or make the pool larger"
        return RequestError("all buffers of the pool are taken", hint=hint)

    def _begin(self, step: _Step) -> bool:
        """Count a read as begun, with memory to go to, if that may be now.

        True as well where there never will be memory: then the pending read has an error.
        """
        if len(self._started) >= self._budget.depth:
            return False
        pending = step.pending
        if pending.memory is None:
            try:
                pending.memory = self._allocate(pending.read)
            except MachineError as error:
                return self._give_up(pending, error)
        if pending.memory is None:
            return False
        return self._budget.begin(self, step.file_read.length, force=not self._started)

    def _give_up(self, pending: PendingRead, error: MachineError) -> bool:
        """Keep one step of a read that failed before it began, in front of those that wait."""
        pending.error = error
        first = self._waiting[0]
        while self._waiting and self._waiting[0].pending is pending:
            self._waiting.popleft()
        self._waiting.appendleft(first)
        return True

    def _request(self, step: _Step, memory: memoryview) -> tuple[int, ReadRequest]:
        file_read = step.file_read
        number = self._next_number
        self._next_number += 1
        self._started[number] = step
        buffer = memory[file_read.start : file_read.start + file_read.length]
        return number, ReadRequest(file_read.path, file_read.offset, buffer)

    def _end(self, completion: Completion) -> PendingRead | None:
        """Take one read's end; return its expert's where that was the last."""
        pending, file_read = self._started.pop(completion.number)
        problem = pending.read.problem(file_read, completion)
        got = completion.length
        self._budget.end(self, file_read.length, got, failed=problem is not None)
        pending.error = pending.error or problem
        pending.open_count -= 1
        return None if pending.open_count else pending
