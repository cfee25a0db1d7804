"""What comes back of several experts: each one's bytes, and the batch that they were asked in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from moepack.errors import MoepackError, RequestError
from moepack.reading.scheduler import Schedule, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moepack.reading.expert_read import Wanted
    from moepack.reading.pack import Pack
    from moepack.storage.buffers import BufferPool


class ExpertBytes:
    """One expert in memory.

    `view` is the whole blob with its padding, or what was asked for of it; it is writable, and the
    caller's until `release`, which gives a pool's buffer back and does nothing otherwise. `number`
    is the expert's place in the list of keys that it was asked in.
    """

    __slots__ = ("_pack", "_pool", "_wanted", "number", "view")

    def __init__(self, pack: Pack, pool: BufferPool | None, task: Task) -> None:
        assert task.memory is not None
        self._pack = pack
        self._pool = pool
        self._wanted = task.wanted
        self.number = task.number
        self.view = task.memory

    @property
    def layer(self) -> int:
        """The layer."""
        return self._wanted.layer

    @property
    def expert(self) -> int:
        """The expert's number in its layer."""
        return self._wanted.expert

    def part(self, name: str) -> memoryview:
        """Give one part's bytes, without padding; `name` as in `Pack.locate`.

        Raises RequestError for one that was not read.
        """
        where = self._pack.locate(self.layer, self.expert, name)
        start = self._wanted.find(where)
        if start is None:
            place = f"layer {self.layer} expert {self.expert} {where.part}"
            raise RequestError("this part was not asked for", path=where.path, place=place)
        return self.view[start : start + where.length]

    def release(self) -> None:
        """Give the buffer back to the reader's pool; neither it nor its views may be used then."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give_back(self.view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Batch:
    """Experts that were asked for together, on their way or there; `Reader.submit` makes it.

    Leaving a `with`, or `close`, gives up what has not begun and waits for what has: until then the
    system may write into the buffers. A batch that is dropped does so as well.
    """

    _is_open = False

    def __init__(
        self,
        pack: Pack,
        pool: BufferPool | None,
        schedule: Schedule,
        check: Callable[[Wanted, memoryview], None],
    ) -> None:
        self._pack = pack
        self._pool = pool
        self._schedule = schedule
        self._check = check
        self._lock = threading.Lock()
        self._untaken: dict[int, None] = {}
        self._ready: dict[int, Task] = {}
        self._was_cut = False

    def start(self, tasks: Sequence[Task]) -> None:
        """Begin to read what is wanted; called once. Raises MachineError and ends it otherwise."""
        with self._lock:
            self._is_open = True
            self._untaken.update(dict.fromkeys(task.number for task in tasks))
            for task in tasks:
                self._schedule.add(task)
            try:
                self._schedule.start()
            except BaseException:
                self._close()
                raise

    def __len__(self) -> int:
        """Say how many experts have not been taken yet."""
        return len(self._untaken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_open:  # else be short: Python ignores a Ctrl-C that comes in here
            self.close()

    def completions(self, *, in_order: bool = False) -> Iterator[ExpertBytes]:
        """Yield the experts as they come from the disk, or in the order in which they were asked.

        An expert that could not be read raises its error in its turn; asking again goes on with the
        rest. Reads that the reader's bounds held back begin here. Raises RequestError where the
        batch or its reader was closed before all experts were taken.
        """
        while (task := self._take(in_order)) is not None:
            yield self._open(task)

    def close(self) -> None:
        """Give up the rest: begin nothing more, wait for what is in flight, free the buffers."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._was_cut = self._was_cut or bool(self._untaken)
        self._untaken.clear()
        for task in (*self._schedule.close(), *self._ready.values()):
            self._free(task)
        self._ready.clear()
        self._is_open = False

    def _take(self, in_order: bool) -> Task | None:
        """Wait for one expert; several threads may, and each gets others. None after the last."""
        with self._lock:
            while self._untaken:
                number = next(iter(self._untaken if in_order else self._ready), None)
                if number in self._ready:
                    del self._untaken[number]
                    return self._ready.pop(number)
                finished = self._schedule.take(wait=True)
                if not finished:
                    raise RequestError("an interruption lost some of the batch")
                for task in finished:
                    self._ready[task.number] = task
            if self._was_cut:
                raise RequestError("the batch was closed before all of it was taken")
        return None

    def _open(self, task: Task) -> ExpertBytes:
        try:
            if task.error is not None:
                raise task.error
            assert task.memory is not None
            self._check(task.wanted, task.memory)
        except MoepackError:
            task.error = None  # the error's traceback holds the task
            self._free(task)
            raise
        return ExpertBytes(self._pack, self._pool, task)

    def _free(self, task: Task) -> None:
        if self._pool is not None and task.memory is not None:
            self._pool.give_back(task.memory)
        task.memory = None
