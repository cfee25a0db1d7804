"""The same reads for asyncio programs: one queue, driven by the event loop, no thread a read.

    async with moepack.aio.Reader(pack) as reader:
        view = await reader.read(3, 17)
        async for expert in reader.read_many([(4, 1), (4, 9)]):
            ...

The backend's queue has a descriptor that is readable when reads have ended (io_uring's eventfd, or
a pipe that the threads write to); the loop watches it and nothing else is waited for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from moepack.errors import MoepackError, RequestError
from moepack.reading import reader as blocking
from moepack.reading.batch import ExpertBytes
from moepack.reading.budget import DEPTH, MAX_LENGTH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from moepack.reading.budget import Statistics
    from moepack.reading.pack import Pack
    from moepack.reading.scheduler import Task
    from moepack.storage.backend import Backend


class Reader:
    """Reads blobs and parts of one pack, for the tasks of one event loop.

    Make it while the loop runs; the options are those of `moepack.Reader`. A read that is cancelled
    ends first: until then the system may write into its memory.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        check_digests: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pack = pack
        self._reader = blocking.Reader(
            pack,
            backend=backend,
            depth=depth,
            max_in_flight=max_in_flight,
            check_digests=check_digests,
        )
        self._schedule = self._reader.schedule()
        try:
            self._watched = self._schedule.queue.fileno()
        except BaseException:
            self._reader.close()
            raise
        self._loop.add_reader(self._watched, self._deliver)
        self._futures: dict[Task, asyncio.Future[Task]] = {}
        self._is_open = True

    @property
    def backend(self) -> str:
        """The name of the backend that reads."""
        return self._reader.backend

    @property
    def why(self) -> str:
        """Why it is that backend."""
        return self._reader.why

    @property
    def statistics(self) -> Statistics:
        """What was read so far, and what is in flight now."""
        return self._reader.statistics

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for what was asked for, then close the data files."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await _settled(list(self._futures.values()))
        finally:
            self._loop.remove_reader(self._watched)
            self._schedule.close()
            self._reader.close()

    async def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob or one part; see `moepack.Reader.read`."""
        (future,) = self._begin([(layer, expert)], _one(part), family, None)
        return ExpertBytes(self._pack, None, await _result(future)).view

    async def read_into(
        self,
        buffer: Any,
        layer: int,
        expert: int,
        part: str | None = None,
        *,
        family: str | None = None,
    ) -> int:
        """Read into the caller's buffer and give the length; see `moepack.Reader.read_into`."""
        (future,) = self._begin([(layer, expert)], _one(part), family, [buffer])
        return (await _result(future)).wanted.length

    async def read_many(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
        in_order: bool = True,
    ) -> AsyncIterator[ExpertBytes]:
        """Read several experts at a time; see `moepack.Reader.read_many`."""
        futures = self._begin(keys, parts, family, into)
        waiting = list(futures)
        try:
            while waiting:
                future = waiting[0] if in_order else await _first(waiting)
                waiting.remove(future)
                yield ExpertBytes(self._pack, None, await _result(future))
        finally:
            await _settled(futures)

    def _begin(
        self,
        keys: Iterable[tuple[int, int]],
        parts: Sequence[str] | None,
        family: str | None,
        into: Sequence[Any] | None,
    ) -> list[asyncio.Future[Task]]:
        if not self._is_open:
            raise RequestError("the reader is closed", path=self._pack.path)
        tasks = self._reader.plan(keys, parts=parts, family=family, into=into)
        futures = [self._loop.create_future() for _ in tasks]
        self._futures.update(zip(tasks, futures, strict=True))
        for task in tasks:
            self._schedule.add(task)
        self._schedule.start()
        self._loop.call_soon(self._deliver)  # nothing signals what failed before it began
        return futures

    def _deliver(self) -> None:
        """Give finished reads to those who wait; the loop calls this."""
        # Once more after the last, since what cannot begin in its place is not signalled.
        while finished := self._schedule.take(wait=False):
            for task in finished:
                self._settle(task, self._futures.pop(task))

    def _settle(self, task: Task, future: asyncio.Future[Task]) -> None:
        try:
            if task.error is not None:
                raise task.error
            assert task.memory is not None
            self._reader.check(task.wanted, task.memory)
        except MoepackError as error:
            task.error = None  # the error's traceback holds the task
            future.set_exception(error)
        else:
            future.set_result(task)


async def _result(future: asyncio.Future[Task]) -> Task:
    await _settled([future])
    return future.result()


async def _first(futures: list[asyncio.Future[Task]]) -> asyncio.Future[Task]:
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    return next(future for future in futures if future in done)


async def _settled(futures: list[asyncio.Future[Task]]) -> None:
    """Wait until all reads have ended, also when whoever waits is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in futures:
        future.exception()  # an error that nobody is left to see is no mistake
    if cancelled is not None:
        raise cancelled


def _one(part: str | None) -> tuple[str] | None:
    return None if part is None else (part,)
