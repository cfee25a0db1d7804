"""Reads of many experts through one queue: begun in the order asked, within the reader's bounds.

Events of one expert: it waits; it gets memory and its extents begin, as far as the bounds and the
pool allow; the extents end in any order; when the last has ended the expert is finished, with an
error or without. Nothing here blocks but `take`, and only while something is in flight.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.reading.budget import InFlight
from moepack.reading.expert_read import Extent, Wanted
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest


class Task:
    """One expert on its way: what is wanted, its memory, and what became of it.

    `memory` is None until the first of its reads begins.
    """

    __slots__ = ("error", "memory", "number", "open_extents", "wanted")

    def __init__(self, number: int, wanted: Wanted, memory: memoryview | None) -> None:
        self.number = number
        self.wanted = wanted
        self.memory = memory
        self.error: MoepackError | None = None
        self.open_extents = len(wanted.extents)


class _Started(NamedTuple):
    task: Task
    extent: Extent


class Schedule:
    """Feeds one queue. `allocate` gives a task its memory, or None when there is none now."""

    def __init__(
        self,
        backend: Backend,
        in_flight: InFlight,
        allocate: Callable[[Wanted], memoryview | None],
    ) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._allocate = allocate
        self._queue: ReadQueue | None = None
        self._waiting: deque[_Started] = deque()
        self._started: dict[int, _Started] = {}
        self._failed: list[Task] = []
        self._next_number = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not (self._waiting or self._started or self._failed)

    def add(self, task: Task) -> None:
        """Let a task wait for its turn."""
        self._waiting.extend(_Started(task, extent) for extent in task.wanted.extents)

    def start(self) -> None:
        """Begin what may begin. Raises MachineError where the backend has no queue to give."""
        if not self._waiting:
            return
        queue = self.queue  # first, so that nothing is counted as begun where there is none
        requests: list[tuple[int, ReadRequest]] = []
        while self._waiting and self._begin(self._waiting[0]):
            item = self._waiting.popleft()
            if item.task.memory is None:
                self._failed.append(item.task)
            else:
                requests.append(self._request(item, item.task.memory))
        if requests:
            queue.start(requests)

    def take(self, *, wait: bool) -> list[Task]:
        """Take the tasks that have finished; with `wait`, and where there are any, at least one.

        Raises RequestError where nothing can begin: the reader is closed, or its pool has no free
        buffer.
        """
        finished: list[Task] = []
        while not self.is_idle:
            self.start()
            finished += self._failed
            self._failed.clear()
            if not self._started:
                if finished or not wait:
                    break
                self._in_flight.check_open()
                hint = "release what was read before, or make the pool larger"
                raise RequestError("all buffers of the pool are taken", hint=hint)
            for completion in self.queue.finished(wait=wait and not finished):
                task = self._end(completion)
                if task is not None:
                    finished.append(task)
            if finished or not wait:
                self.start()
                break
        return finished

    @property
    def queue(self) -> ReadQueue:
        """The backend's queue, made when it is first needed."""
        if self._queue is None:
            try:
                self._queue = self._backend.queue(self._in_flight.depth)
            except OSError as error:
                problem = f"cannot set up {self._backend.name}: {error.strerror}"
                hint = "take what was submitted before submitting more, or use fewer threads"
                raise MachineError(problem, hint=hint) from error
        return self._queue

    def close(self) -> list[Task]:
        """Give up what has not begun and wait for the rest; give the tasks that were cut off."""
        items = (*self._waiting, *self._started.values())
        cut = {id(task): task for task in (*(item.task for item in items), *self._failed)}
        self._failed.clear()
        self._waiting.clear()
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        self._started.clear()
        self._in_flight.forget(self)
        return list(cut.values())

    def _begin(self, item: _Started) -> bool:
        """Count a read as begun, with memory to go to, if that may be now.

        True as well where there never will be memory: then its task has an error.
        """
        if len(self._started) >= self._in_flight.depth:
            return False
        task = item.task
        if task.memory is None:
            try:
                task.memory = self._allocate(task.wanted)
            except MachineError as error:
                return self._give_up(task, error)
        if task.memory is None:
            return False
        return self._in_flight.begin(self, item.extent.length, force=not self._started)

    def _give_up(self, task: Task, error: MachineError) -> bool:
        """Keep one extent of a task that failed before it began, in front of those that wait."""
        task.error = error
        first = self._waiting[0]
        while self._waiting and self._waiting[0].task is task:
            self._waiting.popleft()
        self._waiting.appendleft(first)
        return True

    def _request(self, item: _Started, memory: memoryview) -> tuple[int, ReadRequest]:
        extent = item.extent
        number = self._next_number
        self._next_number += 1
        self._started[number] = item
        buffer = memory[extent.start : extent.start + extent.length]
        return number, ReadRequest(extent.path, extent.offset, buffer)

    def _end(self, completion: Completion) -> Task | None:
        """Take one read's end; give its task where that was the last."""
        task, extent = self._started.pop(completion.number)
        problem = task.wanted.problem(extent, completion)
        got = completion.length
        self._in_flight.end(self, extent.length, got, failed=problem is not None)
        task.error = task.error or problem
        task.open_extents -= 1
        return None if task.open_extents else task
