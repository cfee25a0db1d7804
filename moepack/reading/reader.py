"""Read experts: from (layer, expert, parts) to bytes in memory.

A Reader turns keys into reads, hands them to a backend within its bounds, checks what came back and
names what failed. How the bytes come from the disk is the backend's.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.reading.batch import Batch, ExpertBytes
from moepack.reading.budget import DEPTH, MAX_LENGTH, InFlight, Statistics
from moepack.reading.expert_read import PAGE, Wanted, want
from moepack.reading.scheduler import Schedule, Task
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import allocate, writable_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moepack.reading.pack import Pack
    from moepack.storage.backend import Backend
    from moepack.storage.buffers import BufferPool

MAX_DEPTH = 4096


class Reader:
    """Reads blobs and parts of one pack; `pack.reader()` makes it, `close` or `with` ends it.

    `backend` is `auto`, `uring`, `direct`, `buffered`, or an object that keeps the contract of
    `moepack.storage.backend`. At most `depth` reads and `max_in_flight` bytes are in flight at a
    time, over all batches; a single read, and the first of a batch, is never held back. With
    `pool`, batches are read into its buffers. With `check_digests` each part that is read is
    compared with its digest, and one flipped bit is an error. May be used from several threads.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        pool: BufferPool | None = None,
        check_digests: bool = True,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise RequestError("no such depth", expected=f"1 to {MAX_DEPTH}", found=depth)
        if max_in_flight < 1:
            raise RequestError("no such bound", expected="1 byte or more", found=max_in_flight)
        self._pack = pack
        self._pool = pool
        self._check_digests = check_digests
        if isinstance(backend, str):
            from moepack.storage.probe import (
                choose,  # here, since who only locates needs no backend
            )

            self._backend, self.why = choose(
                backend, pack.file_paths, depth, pool.fixed if pool else None
            )
        else:
            self._backend, self.why = backend, "given by the caller"
        self._in_flight = InFlight(self._backend.name, depth, max_in_flight)
        self._open_work: weakref.WeakSet[Batch | Schedule] = weakref.WeakSet()
        # Also when this is dropped, and when Python ends: then threads are cut off that a later
        # close would wait for.
        self._close = weakref.finalize(
            self, _close, self._in_flight, self._open_work, self._backend
        )

    @property
    def backend(self) -> str:
        """The name of the backend that reads; `why` says why it is that one."""
        return self._backend.name

    @property
    def statistics(self) -> Statistics:
        """What was read so far, and what is in flight now."""
        return self._in_flight.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what has not begun, wait for what is in flight, close the data files.

        Views that were given out stay valid.
        """
        self._close()

    def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob, padding included, or exactly one part's bytes.

        The view is writable, starts on a memory page (in packs aligned to pages) and is the
        caller's: nothing else uses it. Raises RequestError for what the pack does not hold,
        PackError for a file that is shorter than the index says or a digest that differs,
        MachineError when the system cannot read.
        """
        wanted = self._want(layer, expert, part, family)
        memory = _new_memory(wanted)
        self._fill(wanted, memory)
        return memory

    def read_into(
        self,
        buffer: Any,
        layer: int,
        expert: int,
        part: str | None = None,
        *,
        family: str | None = None,
    ) -> int:
        """Read like `read` into the start of the caller's `buffer`; give the length in bytes.

        `buffer` is anything with a writable, contiguous buffer (bytearray, mmap, numpy array,
        pinned memory). What lies behind the length is left alone. A buffer that starts on a page is
        read into without a copy. Raises RequestError where it is too small.
        """
        wanted = self._want(layer, expert, part, family)
        self._fill(wanted, _callers_memory(buffer, wanted))
        return wanted.length

    def read_many(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
        in_order: bool = True,
    ) -> Iterator[ExpertBytes]:
        """Read several experts at a time; yield them in the order asked, or as they come.

        The arguments are those of `submit`. Nothing is read before the first is asked for.
        """
        with self.submit(keys, parts=parts, family=family, into=into) as batch:
            yield from batch.completions(in_order=in_order)
        self._open_work.discard(batch)  # here, since Python ignores a Ctrl-C while it drops objects

    def submit(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
    ) -> Batch:
        """Begin to read several experts and return at once; `Batch.completions` gives them.

        `keys` are (layer, expert). `parts` names what is read of each, the whole blob by default;
        neighbouring parts are one read. `into` has a buffer of the caller's for each key, which is
        the system's until its expert is taken or the batch is closed; without it, memory comes from
        the pool or is new. Raises RequestError for what the pack does not hold and for buffers that
        do not fit, before anything is read.
        """
        tasks = self.plan(keys, parts=parts, family=family, into=into)
        pool = self._pool if into is None else None
        batch = Batch(self._pack, pool, self._schedule(pool), self.check)
        self._in_flight.adopt(batch, self._open_work)  # before anything begins that is to be ended
        batch.start(tasks)
        return batch

    def plan(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
    ) -> list[Task]:
        """Plan the reads of `submit` without beginning any; for those who drive a schedule."""
        self._in_flight.check_open()
        wanted = [want(self._pack, layer, expert, parts, family) for layer, expert in keys]
        if into is None:
            if self._pool is not None:
                _check_pool(self._pool, wanted)
            return [Task(number, one, None) for number, one in enumerate(wanted)]
        if len(into) != len(wanted):
            raise RequestError("not one buffer a key", expected=len(wanted), found=len(into))
        pairs = enumerate(zip(wanted, into, strict=True))
        return [Task(number, one, _callers_memory(buffer, one)) for number, (one, buffer) in pairs]

    def schedule(self) -> Schedule:
        """Make a schedule over this reader's backend and bounds, which is used by one thread."""
        schedule = self._schedule(None)
        self._in_flight.adopt(schedule, self._open_work)
        return schedule

    def _schedule(self, pool: BufferPool | None) -> Schedule:
        def from_pool(wanted: Wanted) -> memoryview | None:
            assert pool is not None
            return pool.take(wanted.length)

        allocate_one = _new_memory if pool is None else from_pool
        return Schedule(self._backend, self._in_flight, allocate_one)

    def check(self, wanted: Wanted, memory: memoryview) -> None:
        """Compare what was read with its digests, if this reader does; raise PackError."""
        if not self._check_digests:
            return
        try:
            wanted.check_digests(self._pack, memory)
        except PackError:
            self._in_flight.add_error()
            raise

    def _want(self, layer: int, expert: int, part: str | None, family: str | None) -> Wanted:
        self._in_flight.check_open()
        return want(self._pack, layer, expert, None if part is None else (part,), family)

    def _fill(self, wanted: Wanted, memory: memoryview) -> None:
        """Read into `memory`, in this thread, and check what came."""
        owner = threading.get_ident()
        for extent in wanted.extents:
            buffer = memory[extent.start : extent.start + extent.length]
            problem: MoepackError | None = None
            got, failed = 0, True
            try:
                if not self._in_flight.begin(owner, extent.length, force=True):
                    self._in_flight.check_open()
                request = ReadRequest(extent.path, extent.offset, buffer)
                completion = self._backend.read(request)
                problem = wanted.problem(extent, completion)
                got, failed = completion.length, problem is not None
            finally:
                self._in_flight.end(owner, extent.length, got, failed=failed)
            if problem is not None:
                try:
                    raise problem
                finally:
                    del problem  # its traceback holds this frame, and that holds the buffer
        self.check(wanted, memory)


def _close(
    in_flight: InFlight, open_work: weakref.WeakSet[Batch | Schedule], backend: Backend
) -> None:
    in_flight.close()
    for work in list(open_work):
        work.close()
    in_flight.forget(threading.get_ident())  # an interrupted read; this thread reads nothing now
    in_flight.drain()
    backend.close()


def _new_memory(wanted: Wanted) -> memoryview:
    """Give memory that lies within its page as the extents lie within theirs."""
    try:
        return allocate(wanted.length, wanted.extents[0].offset % PAGE)
    except MachineError as error:
        error.path = str(wanted.extents[0].path)
        error.place = wanted.place(wanted.extents[0])
        raise


def _callers_memory(buffer: Any, wanted: Wanted) -> memoryview:
    try:
        return writable_bytes(buffer, wanted.length)
    except RequestError as error:
        error.place = wanted.place(wanted.extents[0])
        raise


def _check_pool(pool: BufferPool, wanted: list[Wanted]) -> None:
    for one in wanted:
        if one.length > pool.length:
            raise RequestError(
                "the pool's buffers are too small",
                place=one.place(one.extents[0]),
                expected=f"{one.length} bytes",
                found=pool.length,
            )
