"""Reads for asyncio programs: one queue, driven by the event loop, without a thread per read.

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

from moepack.common.errors import MoepackError, RequestError
from moepack.pack.reading.batch import ExpertBytes
from moepack.pack.reading.in_flight import DEPTH, MAX_LENGTH
from moepack.pack.reading.reader import Reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from moepack.pack.reading.catalog import Catalog
    from moepack.pack.reading.in_flight import Statistics
    from moepack.pack.reading.scheduler import PendingRead
    from moepack.storage.backend import Backend


class AsyncReader:
    """Reads blobs and parts of one pack, for the tasks of one event loop.

    Make it while the loop runs; the options are those of `moepack.Reader`. A read that is cancelled
    ends first: until then the system may write into its memory. After a fork it is of no use in the
    child.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        check: str = "always",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._reader = Reader(
            catalog,
            backend=backend,
            depth=depth,
            max_in_flight=max_in_flight,
            check=check,
        )
        self._scheduler = self._reader.scheduler()
        try:
            self._watched = self._scheduler.queue.fileno()
        except BaseException:
            self._reader.close()
            raise
        self._loop.add_reader(self._watched, self._deliver)
        self._futures: dict[PendingRead, asyncio.Future[PendingRead]] = {}
        self._decoding: set[asyncio.Task[None]] = set()
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
        """Counts of the reads so far, and of those in flight now."""
        return self._reader.statistics

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for all reads, then close the data files."""
        if not self._is_open:
            return
        self._is_open = False
        if self._reader.is_forked:
            return  # the loop's own descriptors are the parent's as well
        try:
            await _settled(list(self._futures.values()))
        finally:
            self._loop.remove_reader(self._watched)
            self._scheduler.close()
            self._reader.close()

    async def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob or one part; see `moepack.Reader.read`."""
        (future,) = self._begin([(layer, expert)], _names(part), family, None)
        return ExpertBytes(None, await _result(future)).view

    async def read_into(
        self,
        buffer: Any,
        layer: int,
        expert: int,
        part: str | None = None,
        *,
        family: str | None = None,
    ) -> int:
        """Read into the caller's buffer and return the length; see `moepack.Reader.read_into`."""
        (future,) = self._begin([(layer, expert)], _names(part), family, [buffer])
        return (await _result(future)).read.length

    async def read_many(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: str | Sequence[str] | None = None,
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
                yield ExpertBytes(None, await _result(future))
        finally:
            await _settled(futures)

    def _begin(
        self,
        keys: Iterable[tuple[int, int]],
        parts: str | Sequence[str] | None,
        family: str | None,
        into: Sequence[Any] | None,
    ) -> list[asyncio.Future[PendingRead]]:
        if not self._is_open:
            raise RequestError("the reader is closed", path=self._catalog.path)
        reads = self._reader.plan(keys, parts=parts, family=family, into=into)
        futures = [self._loop.create_future() for _ in reads]
        self._futures.update(zip(reads, futures, strict=True))
        self._scheduler.add(reads)
        self._scheduler.start()
        self._loop.call_soon(self._deliver)  # nothing signals what failed before it began
        return futures

    def _deliver(self) -> None:
        """Return finished reads to their callers; the loop calls this."""
        # Once more after the last, since what cannot begin in its place is not signalled.
        while finished := self._scheduler.collect(wait=False):
            for pending in finished:
                if pending.is_decoded:
                    self._settle(pending)
                else:
                    task = self._loop.create_task(self._settle_decoded(pending))
                    self._decoding.add(task)  # the loop itself does not hold it
                    task.add_done_callback(self._decoding.discard)

    async def _settle_decoded(self, pending: PendingRead) -> None:
        """Wait until a read is decoded, and return it to its caller."""
        try:
            await _settled([asyncio.wrap_future(decoding) for decoding in pending.decodings])
        finally:
            self._settle(pending)

    def _settle(self, pending: PendingRead) -> None:
        pending.settle()
        future = self._futures.pop(pending)
        try:
            self._reader.finish(pending)
        except MoepackError as error:
            pending.error = None  # the error's traceback holds the read
            future.set_exception(error)
        else:
            future.set_result(pending)


async def _result(future: asyncio.Future[PendingRead]) -> PendingRead:
    await _settled([future])
    return future.result()


async def _first(futures: list[asyncio.Future[PendingRead]]) -> asyncio.Future[PendingRead]:
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    return next(future for future in futures if future in done)


async def _settled(futures: Sequence[asyncio.Future[Any]]) -> None:
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


def _names(part: str | None) -> tuple[str] | None:
    return None if part is None else (part,)
