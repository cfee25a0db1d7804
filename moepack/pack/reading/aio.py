"""Reads for asyncio programs: the blocking reader's calls, in threads of its own.

async with moepack.aio.Reader(pack) as reader:
    view = await reader.read(3, 17)
    async for expert in reader.read_many([(4, 1), (4, 9)]):
        ...
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from moepack.common.errors import MoepackError, RequestError
from moepack.pack.reading.in_flight import DEPTH, MAX_LENGTH
from moepack.pack.reading.reader import Reader
from moepack.storage.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from moepack.pack.reading.batch import ExpertBytes
    from moepack.pack.reading.catalog import Catalog
    from moepack.pack.reading.in_flight import Statistics
    from moepack.storage.backend import Backend

T = TypeVar("T")


class AsyncReader:
    """Reads blobs and parts of one pack, for the tasks of one event loop.

    Make it while the loop runs; the options are those of `moepack.Reader`. Up to `depth` calls are
    carried out at a time, each in a thread. A read that is cancelled ends first: until then the
    system may write into its memory. After a fork it is of no use in the child.
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
        self._threads = ThreadPool(depth, thread_name_prefix="moepack read")
        self._calls: set[asyncio.Future[Any]] = set()
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
        self._is_open = False
        if self._reader.is_forked:
            return  # the threads are the parent's
        try:
            await _settled(self._calls)
        finally:
            self._threads.shutdown()
            self._reader.close()

    async def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob or one part; see `moepack.Reader.read`."""
        return await self._result(partial(self._reader.read, layer, expert, part, family=family))

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
        read_into = self._reader.read_into
        return await self._result(partial(read_into, buffer, layer, expert, part, family=family))

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
        submit = partial(self._reader.submit, list(keys), parts=parts, family=family, into=into)
        experts: asyncio.Queue[ExpertBytes | MoepackError | None] = asyncio.Queue()

        def deliver(expert: ExpertBytes | MoepackError) -> None:
            self._loop.call_soon_threadsafe(experts.put_nowait, expert)

        def read() -> None:
            with submit() as batch:
                for _ in range(len(batch)):  # one error ends `completions`, the next goes on
                    try:
                        for expert in batch.completions(in_order=in_order):
                            deliver(expert)
                    except MoepackError as error:
                        deliver(error)

        reading = self._begin(read)
        reading.add_done_callback(lambda _: experts.put_nowait(None))
        try:
            while (expert := await experts.get()) is not None:
                if isinstance(expert, MoepackError):
                    raise expert
                yield expert
            reading.result()
        finally:
            await _settled([reading])

    def _begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a call in a thread. Raises RequestError if the reader is closed."""
        if not self._is_open:
            raise RequestError("the reader is closed", path=self._catalog.path)
        future = self._loop.run_in_executor(self._threads, call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def _result(self, call: Callable[[], T]) -> T:
        future = self._begin(call)
        await _settled([future])
        return future.result()


async def _settled(calls: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all calls have ended, also when whoever waits is cancelled meanwhile."""
    calls = list(calls)
    cancelled: asyncio.CancelledError | None = None
    while pending := [call for call in calls if not call.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for call in calls:
        call.exception()  # an error that nobody is left to see is no mistake
    if cancelled is not None:
        raise cancelled
