"""Read experts: from (layer, expert, parts) to bytes in memory.

A Reader turns keys into reads, hands them to a backend within its limits, checks the bytes and
names the place of an error. How the bytes come from the disk is the backend's business.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from moepack.common.closing import Closing
from moepack.common.errors import MirrorWarning, RequestError
from moepack.common.paths import is_remote
from moepack.pack.reading.batch import Batch, ExpertBytes
from moepack.pack.reading.checked_reads import CHECKS, CheckedReads, PendingRead
from moepack.pack.reading.expert_read import (
    ExpertRead,
    callers_memory,
    new_memory,
    plan_read,
    plan_tensor,
)
from moepack.pack.reading.in_flight import DEPTH, MAX_LENGTH, InFlight, SecondSource, Statistics
from moepack.storage.extents import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from moepack.pack.reading.catalog import Catalog
    from moepack.storage.arena import Arena
    from moepack.storage.backend import Backend

MAX_DEPTH = 4096


class Reader(Closing):
    """Reads blobs and parts of one pack; `pack.reader()` makes it, `close` or `with` ends it.

    `backend` is `auto`, `direct`, `buffered`, or an implementation of
    `moepack.storage.backend`. At most `depth` reads and `max_in_flight` bytes are in flight at a
    time, over all batches; a single read, and the first of a batch, is never held back. `check` is
    when a part is compared with its digest: `always`, the `first` time that this reader reads it,
    or `never`. One flipped bit is an error.

    With `mirror`, reads are spread over the pack and its mirror, if it has one: see `moepack
    mirror`. Reads through the page cache are not, since the cache would then hold both copies. If
    the mirror returns an error or wrong bytes, only the pack is read from then on; this is a
    MirrorWarning, and so is a mirror that is missing or another pack's. In a partial pack (see
    `moepack pull`) experts that are not here are read where the pack came from, and so are those
    that are damaged here, with a MirrorWarning.

    May be used from several threads, but only in the process that made it: after a fork every call
    in the child raises RequestError, and the child opens the pack again. Fork while nothing is in
    flight: the parent's reads may otherwise end in a page that only the child still has.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        check: str = "always",
        mirror: bool = True,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise RequestError("no such depth", expected=f"1 to {MAX_DEPTH}", found=depth)
        if max_in_flight < 1:
            raise RequestError("no such bound", expected="1 byte or more", found=max_in_flight)
        if check not in CHECKS:
            raise RequestError("no such check", expected=", ".join(CHECKS), found=repr(check))
        catalog.check_open()
        self._catalog = catalog
        # Here, since callers that only locate need neither memory nor a backend.
        from moepack.storage.arena import Arena

        self._arena = Arena(2 * max_in_flight)
        if isinstance(backend, str):
            from moepack.storage.probe import choose

            files: Iterable[Path] = catalog.file_paths
            if not is_remote(catalog.path):
                # A missing file is an error of the pack, when it is read.
                files = (path for path in files if path.is_file())
            self._backend, self.why = choose(backend, files)
        else:
            self._backend, self.why = backend, "given by the caller"
        second = self._open_second(is_mirror_read=mirror)
        self._in_flight = InFlight(self._backend, depth, max_in_flight, second)
        self._reads = CheckedReads(self._in_flight, check)
        self._finalizer = weakref.finalize(self, _end, self._in_flight, self._arena)

    @property
    def backend(self) -> str:
        """The name of the backend that reads; `why` is the reason for it."""
        return self._backend.name

    def _open_second(self, *, is_mirror_read: bool) -> SecondSource | None:
        """Open the second source of the pack, if it has one: its origin, or its mirror."""
        # Here, since few packs have one.
        if self._catalog.partial is not None:
            from moepack.pack.reading.origin import OriginBackend, OriginUse

            self._backend = OriginBackend(self._catalog.partial, self._backend)
            return OriginUse(self._catalog.partial)
        mirror = self._catalog.mirror if is_mirror_read and self.backend != "buffered" else None
        if mirror is None:
            return None
        if mirror.record is None or mirror.problem is not None:
            text = SecondSource(mirror.path, {}).warning(str(mirror.problem))
            warnings.warn(text, MirrorWarning, stacklevel=2)
            return None
        record, paths = mirror.record, self._catalog.file_paths
        return SecondSource(mirror.path, {p: RangeSet(record.ranges(p.name)) for p in paths})

    @property
    def mirror(self) -> Path | None:
        """The folder of the mirror that is read as well; None without one, or after it failed."""
        return None if self._in_flight.second is None else self._in_flight.second.mirror

    @property
    def statistics(self) -> Statistics:
        """Counts of the reads so far, and of those in flight now."""
        self._in_flight.check_process()
        return self._in_flight.statistics()

    def __repr__(self) -> str:
        return f"<moepack.Reader of {self._catalog.path}, {self.backend} ({self.why})>"

    def close(self) -> None:
        """Drop the reads that have not begun, wait for the others, close the data files.

        Views of experts stay valid.
        """
        if self._finalizer.alive:
            _end(self._in_flight, self._arena)
            self._finalizer.detach()

    def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob, padding included, or exactly one part's bytes.

        The view is writable, starts on a memory page (in packs aligned to pages) and is the
        caller's: nothing else uses it. If parts of the expert lie apart, it has all parts, on pages
        of their own; get them with `read_many`, whose experts have `part`. Raises RequestError for
        an expert or part that the pack does not have, PackError for a file that is too short or a
        digest that differs, MachineError when the system cannot read.
        """
        read = self._plan(layer, expert, part, family)
        memory = new_memory(self._arena, read)
        self._reads.fill(read, memory)
        return memory.view

    def read_into(
        self,
        buffer: Any,
        layer: int,
        expert: int,
        part: str | None = None,
        *,
        family: str | None = None,
    ) -> int:
        """Read like `read` into the start of the caller's `buffer`; return the length in bytes.

        `buffer` is anything with a writable, contiguous buffer (bytearray, mmap, numpy array,
        pinned memory). Its bytes after the length are not touched. A buffer that starts on a page
        is read into without a copy. Raises RequestError if it is too small.
        """
        read = self._plan(layer, expert, part, family)
        self._reads.fill(read, callers_memory(buffer, read))
        return read.length

    def read_dense(self, name: str) -> memoryview:
        """Read a dense tensor, by its name in the source; exactly its bytes.

        The view is as that of `read`, and so are the errors.
        """
        read = self._plan_dense(name)
        memory = new_memory(self._arena, read)
        self._reads.fill(read, memory)
        return memory.view

    def read_dense_into(self, buffer: Any, name: str) -> int:
        """Read a dense tensor into the start of the caller's `buffer`; return its length in bytes.

        `buffer` is as for `read_into`.
        """
        read = self._plan_dense(name)
        self._reads.fill(read, callers_memory(buffer, read))
        return read.length

    def read_many(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: str | Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
        in_order: bool = True,
    ) -> Iterator[ExpertBytes]:
        """Read several experts at a time; yield them in the order of `keys`, or as reads finish.

        The arguments are those of `submit`. Nothing is read before the first expert is requested.
        If the loop is left early, reads that have begun write into buffers until they end; a `with`
        around `submit` waits for them.
        """
        batch = self.submit(keys, parts=parts, family=family, into=into)
        try:
            yield from batch.completions(in_order=in_order)
        except GeneratorExit:
            raise  # perhaps in a finaliser, which must not wait
        except BaseException:
            batch.close()
            raise
        batch.close()

    def submit(
        self,
        keys: Iterable[tuple[int, int]],
        *,
        parts: str | Sequence[str] | None = None,
        family: str | None = None,
        into: Sequence[Any] | None = None,
    ) -> Batch:
        """Begin to read several experts and return at once; `Batch.completions` yields them.

        `keys` are (layer, expert). `parts` names one or several parts to read of each, the whole
        blob by default; neighbouring parts are one read. `into` has a buffer of the caller's for
        each key, which is the system's until its expert is taken or the batch is closed; without
        it, memory is new. An item of `into` may also be a mapping of names
        of parts to buffers: one read then fills a buffer for each part, without the padding. Raises
        RequestError for experts or parts that the pack does not have and for buffers that do not
        fit, before anything is read.
        """
        self._in_flight.check_open()
        if isinstance(parts, str):
            parts = (parts,)
        catalog = self._catalog
        reads = [plan_read(catalog, layer, expert, parts, family) for layer, expert in keys]
        if into is None:
            return self.submit_reads(reads)
        if len(into) != len(reads):
            raise RequestError(
                "`into` needs one buffer for each key", expected=len(reads), found=len(into)
            )
        return self._begin(
            PendingRead(number, read, callers_memory(into[number], read))
            for number, read in enumerate(reads)
        )

    def submit_reads(self, reads: Iterable[ExpertRead]) -> Batch:
        """Begin reads that were planned elsewhere, wherever they lie; else as `submit`."""
        return self._begin(PendingRead(number, read, None) for number, read in enumerate(reads))

    def _begin(self, pending: Iterable[PendingRead]) -> Batch:
        batch = Batch(self, self._reads, self._arena, list(pending))
        try:
            batch.start()
        except BaseException:
            batch.close()
            raise
        return batch

    def _plan(self, layer: int, expert: int, part: str | None, family: str | None) -> ExpertRead:
        self._in_flight.check_open()
        parts = None if part is None else (part,)
        return plan_read(self._catalog, layer, expert, parts, family)

    def _plan_dense(self, name: str) -> ExpertRead:
        self._in_flight.check_open()
        return plan_tensor(self._catalog.locate_dense(name))


def _end(in_flight: InFlight, arena: Arena) -> None:
    """End a reader that was closed or dropped, or when Python ends.

    A batch keeps its reader, so that a dropped one has nothing in flight that anybody takes.
    """
    arena.close()
    in_flight.close()
