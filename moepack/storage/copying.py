"""Copy extents into new files: the one hot loop of packing, restoring and exporting.

Runs are written at their planned offsets, through a small buffer that stays in the processor's
cache: bytes are read into it, digested there, and written from it. Memory does not depend on the
size of an expert or of the model. Threads take runs in the order of the new files, so that one
large file keeps all of them busy. Or each run is one extent, and they are taken in the order of the
inputs, which threads read ahead: for remote inputs.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from moepack.common import digest
from moepack.storage import libc
from moepack.storage.blocks import clone_range
from moepack.storage.extents import Extent, FinishedFile, NewFile, Run, is_written, runs
from moepack.storage.folders import lock
from moepack.storage.inputs import Inputs, PrefetchedInputs
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import SharedProgress, ThreadPool

BUFFER_LENGTH = 512 << 10
_sync_file_range = libc.function(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(eq=False)
class Copier:
    """Fills new files in the folder `target` from `inputs`; `write` does it.

    With `resume` a file may be there in part: a run that is correct already is left as it is, as
    far as the digests of its extents are known. With `clone` ranges are shared with the inputs if
    the file system can: these are not read, and have the digests expected. Without `syncs` the
    caller syncs the files. With `by_input` the inputs, all of them files, are read from start to
    end; one that is read whole must have the SHA-256 in its stamp. `advanced` is called with the
    bytes done since its last call, from one thread at a time. `compared_length` is the bytes that
    were found to have the digests expected.
    """

    target: Path
    inputs: Inputs
    advanced: Callable[[int], None]
    _: KW_ONLY
    resume: bool = False
    clone: bool = False
    syncs: bool = True
    by_input: bool = False
    cloned_length: int = field(default=0, init=False)
    kept_length: int = field(default=0, init=False)
    compared_length: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._source: Inputs | PrefetchedInputs = self.inputs
        self._advance = SharedProgress(self.advanced)
        self._lock = threading.Lock()
        self._open_files: set[_OpenFile] = set()

    def write(
        self, files: Sequence[NewFile], threads: int, finished: Callable[[FinishedFile], None]
    ) -> None:
        """Write and sync `files` with `threads`; call `finished` after each, in this thread.

        Each file is locked until `finished` has returned. The first failure, or an interruption,
        stops all threads and is raised; RequestError if another process writes one of them.
        """
        if self.by_input:
            written = self._written_by_input(files, threads)
        elif threads == 1:
            written = self._written(self._work(files))
        else:
            written = self._written_by_threads(self._work(files), threads)
        try:
            with closing(written):
                for file in written:
                    finished(FinishedFile(file.name, file.digests))
                    self._open_files.remove(file)
                    os.close(file.descriptor)
        finally:
            while self._open_files:
                os.close(self._open_files.pop().descriptor)

    def _written_by_input(self, files: Sequence[NewFile], threads: int) -> Generator[_OpenFile]:
        """Copy one extent at a time in the order of the inputs; yield the files they complete."""
        pairs = sorted(
            self._work(files, partial(runs, length=0)),
            key=lambda pair: [(each.input, each.input_offset) for each in pair[1].extents],
        )
        extents = [extent for _, run in pairs for extent in run.extents if extent.length]
        with ThreadPool(max_workers=threads) as executor:
            self._source = source = PrefetchedInputs(self.inputs, extents, executor, threads)
            yield from self._written(iter(pairs))
            source.finish_span()

    def _written_by_threads(self, work: Work, threads: int) -> Generator[_OpenFile]:
        """Copy runs in threads; yield the files they complete."""
        done: queue.SimpleQueue[_OpenFile | Future[None]] = queue.SimpleQueue()

        def copy() -> None:
            for file in self._written(work):
                done.put(file)

        with ThreadPool(threads, self._advance) as executor:
            for _ in range(threads):
                executor.submit(copy).add_done_callback(done.put)
            while threads:
                item = done.get()
                if isinstance(item, _OpenFile):
                    yield item
                else:
                    item.result()
                    threads -= 1

    def _work(
        self, files: Sequence[NewFile], cut: Callable[[NewFile], Iterator[Run]] = runs
    ) -> Work:
        """Yield runs, those of a file one after the other; create each file before its first."""
        for new in files:
            file = self._create(new)
            for run in cut(new):
                yield file, run

    def _create(self, new: NewFile) -> _OpenFile:
        """Create a file and lock it."""
        digests = array("Q", (0 for _ in new.extents()))
        path = self.target / new.name
        # A file that is there already is not the planned one, wherever it came from.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if self.resume else os.O_EXCL)
        file = _OpenFile(new.name, open_regular(path, flags), digests, len(digests))
        self._open_files.add(file)
        lock(file.descriptor, path)
        if os.fstat(file.descriptor).st_size > new.length:
            os.ftruncate(file.descriptor, new.length)
        return file

    def _written(self, work: Work) -> Generator[_OpenFile]:
        """Copy runs until there are none left; yield the files they complete."""
        buffer = memoryview(bytearray(BUFFER_LENGTH))
        while True:
            with self._lock:
                pair = next(work, None)
            if pair is None:
                return
            file, run = pair
            if self.resume and is_written(file.descriptor, run, buffer):
                digests = [extent.digest or 0 for extent in run.extents]
                self._advance(run.end - run.start)
                with self._lock:
                    self.kept_length += run.end - run.start
                    self.compared_length += sum(extent.length for extent in run.extents)
            else:
                writer = _RunWriter(file.descriptor, run.start, run.end, buffer, self._advance)
                digests = self._copy_all(run.extents, writer)
                writer.finish()
            with self._lock:
                file.digests[run.first : run.first + len(digests)] = array("Q", digests)
                file.left -= len(digests)
                is_whole = not file.left
            if is_whole:
                if self.syncs:
                    os.fsync(file.descriptor)
                yield file

    def _copy_all(self, extents: Sequence[Extent], writer: _RunWriter) -> list[int]:
        """Copy extents one after the other; return their digests."""
        digests: list[int] = []
        while len(digests) < len(extents):
            extent = extents[len(digests)]
            writer.pad_to(extent.offset)
            digests += self._clone(extents, len(digests), writer) or [self._copy(extent, writer)]
        return digests

    def _clone(self, extents: Sequence[Extent], start: int, writer: _RunWriter) -> list[int]:
        """Share the extents from `start` on that lie together in their input and in the new file.

        Return their digests, none if they are not shared.
        """
        together = extents[start]
        source = self.inputs.descriptor(together.input)
        if not self.clone or source is None or not together.is_blocks:
            return []
        digests = [together.digest or 0]
        for extent in islice(extents, start + 1, None):
            if not (extent.is_blocks and together.is_before(extent)):
                break
            together = together._replace(length=together.length + extent.length)
            digests.append(extent.digest or 0)
        if not writer.clone(source, together):
            self.clone = False
            return []
        with self._lock:
            self.cloned_length += together.length
        return digests

    def _copy(self, extent: Extent, writer: _RunWriter) -> int:
        """Read an extent into a writer's spaces; check and return its digest."""
        computed = digest.stream()
        for piece in read_extent(self._source, extent, writer.space):
            computed.update(piece)
            writer.advance(len(piece))
        self.inputs.check_digest(extent, computed.intdigest())
        if extent.digest is not None:
            with self._lock:
                self.compared_length += extent.length
        return computed.intdigest()


def read_extent(
    inputs: Inputs | PrefetchedInputs, extent: Extent, space_for: Callable[[int], memoryview]
) -> Iterator[memoryview]:
    """Yield the bytes of an extent, in the spaces for its remaining length. Raises as `inputs`."""
    offset, left = extent.input_offset, extent.length
    while left:
        space = space_for(left)
        length = inputs.read_into(extent.input, offset, space)
        yield space[:length]
        left -= length
        offset += length


@dataclass(eq=False)
class _RunWriter:
    """Writes a run of an open file from `start` to `end`: bytes, zeros between them, or clones."""

    descriptor: int
    start: int
    end: int
    buffer: memoryview
    advanced: Callable[[int], None]

    def __post_init__(self) -> None:
        self._flushed = self.start
        self._filled = 0

    def space(self, limit: int) -> memoryview:
        """Return free space of up to `limit` bytes, one at least, behind the bytes so far."""
        if self._filled == len(self.buffer):
            self._flush()
        return self.buffer[self._filled : min(len(self.buffer), self._filled + limit)]

    def advance(self, length: int) -> None:
        """Count the first `length` bytes of the space as written."""
        self._filled += length

    def pad_to(self, offset: int) -> None:
        """Write zeros up to `offset` from the start of the file."""
        assert offset >= self._flushed + self._filled, "extents overlap, or are not in order"
        while (missing := offset - self._flushed - self._filled) > 0:
            space = self.space(missing)
            space[:] = bytes(len(space))
            self.advance(len(space))

    def clone(self, source: int, extent: Extent) -> bool:
        """Share an extent with the open file `source`; return whether the file system did."""
        self._flush()
        offset, length = extent.input_offset, extent.length
        if not clone_range(source, offset, length, self.descriptor, extent.offset):
            return False
        self.advanced(length)
        self._flushed += length
        return True

    def finish(self) -> None:
        """Write the rest."""
        self.pad_to(self.end)
        self._flush()

    def _flush(self) -> None:
        self.advanced(self._filled)
        ready, offset = self.buffer[: self._filled], self._flushed
        self._flushed += self._filled
        self._filled = 0
        while ready:
            length = os.pwrite(self.descriptor, ready, offset)
            if _sync_file_range is not None:
                # The drive begins now instead of at the sync: half the time of a pack on a disk. It
                # promises nothing, so its result does not matter: the sync at the end decides.
                _sync_file_range(self.descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
            ready, offset = ready[length:], offset + length


@dataclass(eq=False)
class _OpenFile:
    """A new file, locked; `left` is the number of its extents that are not written."""

    name: str
    descriptor: int
    digests: array[int]
    left: int


Work = Iterator[tuple[_OpenFile, Run]]
"""The runs that are left to write; advanced under the copier's lock."""
