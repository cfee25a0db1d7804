"""Copy extents into new files: the one hot loop of packing, restoring and exporting.

Threads take runs of any file and write them at their planned offsets, through a small buffer that
stays in the processor's cache: bytes are read into it, digested there, and written from it. Memory
does not depend on the size of an expert or of the model, and one large file keeps all of them busy.
"""

from __future__ import annotations

import os
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.storage.extents import Extent, NewFile, Run, is_written, runs
from moepack.storage.inputs import Inputs
from moepack.storage.lock import lock
from moepack.storage.regular_file import open_regular
from moepack.storage.run_writer import RunWriter
from moepack.storage.thread_pool import SharedProgress, ThreadPool

BUFFER_LENGTH = 512 << 10


class WrittenFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets."""

    name: str
    digests: array[int]


class Copier:
    """Fills new files in the folder `target` from `inputs`; `write` does it.

    With `resume` a file may be there in part: a run that is correct already is left as it is, as
    far as the digests of its extents are known. With `clone` ranges are shared with the inputs if
    the file system can; with `trusts_clones` these are not read, and have the digests expected.
    Without `syncs` the caller syncs the files.
    `advanced` is called with the bytes done since its last call, from one thread at a time.
    `compared_length` is the bytes that were found to have the digests expected.
    """

    def __init__(
        self,
        target: Path,
        inputs: Inputs,
        advanced: Callable[[int], None],
        *,
        resume: bool = False,
        clone: bool = False,
        trusts_clones: bool = False,
        syncs: bool = True,
    ) -> None:
        self._target = target
        self._inputs = inputs
        self._advance = SharedProgress(advanced)
        self._resume = resume
        self._clones = clone
        self._trusts_clones = trusts_clones
        self._syncs = syncs
        self.cloned_length = 0
        self.kept_length = 0
        self.compared_length = 0
        self._lock = threading.Lock()
        self._open_files: dict[str, _OpenFile] = {}

    def write(
        self, files: Sequence[NewFile], threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        """Write and sync `files` with `threads`; call `finished` after each, in this thread.

        Each file is locked until `finished` has returned. The first failure, or an interruption,
        stops all threads and is raised; RequestError if another process writes one of them.
        """
        work = self._work(files)

        def release(written: WrittenFile) -> None:
            finished(written)
            self._open_files.pop(written.name).close()

        try:
            if threads == 1:
                for written in self._written(work):
                    release(written)
            else:
                self._write_in_threads(work, threads, release)
        finally:
            for file in self._open_files.values():
                file.close()

    def _write_in_threads(
        self, work: Work, threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        done: queue.SimpleQueue[WrittenFile | Future[None]] = queue.SimpleQueue()

        def copy() -> None:
            for written in self._written(work):
                done.put(written)

        with ThreadPool(max_workers=threads) as executor:
            try:
                for _ in range(threads):
                    executor.submit(copy).add_done_callback(done.put)
                while threads:
                    item = done.get()
                    if isinstance(item, WrittenFile):
                        finished(item)
                    else:
                        item.result()
                        threads -= 1
            except BaseException:
                self._advance.stop()
                raise

    def _work(self, files: Sequence[NewFile]) -> Work:
        """Yield runs, those of a file one after the other; create each file before its first."""
        for new in files:
            file = _OpenFile(new, self._target, self._resume)
            self._open_files[new.name] = file
            for run in runs(new):
                file.begin(run)
                yield file, run

    def _written(self, work: Work) -> Iterator[WrittenFile]:
        """Copy runs until there are none left; yield the files they complete."""
        buffer = memoryview(bytearray(BUFFER_LENGTH))
        while True:
            with self._lock:
                pair = next(work, None)
            if pair is None:
                return
            file, run = pair
            if self._resume and is_written(file.descriptor, run, buffer):
                digests = [extent.digest or 0 for extent in run.extents]
                self._advance(run.end - run.start)
                with self._lock:
                    self.kept_length += run.end - run.start
                    self.compared_length += sum(extent.length for extent in run.extents)
            else:
                writer = RunWriter(file.descriptor, run.start, run.end, buffer, self._advance)
                digests = self._copy_all(run.extents, writer)
                writer.finish()
            with self._lock:
                is_whole = file.end(run, digests)
            if is_whole:
                if self._syncs:
                    os.fsync(file.descriptor)
                yield WrittenFile(file.name, file.digests)

    def _copy_all(self, extents: Sequence[Extent], writer: RunWriter) -> list[int]:
        """Copy extents one after the other; return their digests."""
        digests: list[int] = []
        while len(digests) < len(extents):
            start = len(digests)
            if count := self._clone_unread(extents, start, writer):
                digests += [extent.digest or 0 for extent in extents[start : start + count]]
            else:
                extent = extents[start]
                digests.append(self._copy(extent, writer))
                if extent.digest is not None:
                    with self._lock:
                        self.compared_length += extent.length
        return digests

    def _clone_unread(self, extents: Sequence[Extent], start: int, writer: RunWriter) -> int:
        """Share extents from `start` on that lie together in both files; return how many."""
        first, count = extents[start], 1
        source = self._inputs.descriptor(first.input)
        if not (self._clones and self._trusts_clones and source is not None and first.is_blocks):
            return 0
        together = first
        for number in range(start + 1, len(extents)):
            extent = extents[number]
            if not (extent.is_blocks and together.is_before(extent)):
                break
            together = together._replace(length=together.length + extent.length)
            count += 1
        writer.pad_to(together.offset)
        writer.scratch()
        if not writer.clone(source, together):
            self._clones = False
            return 0
        with self._lock:
            self.cloned_length += together.length
        return count

    def _copy(self, extent: Extent, writer: RunWriter) -> int:
        """Copy one extent and return its digest; raise if that is not the one expected."""
        writer.pad_to(extent.offset)
        source = self._inputs.descriptor(extent.input)
        if self._clones and source is not None and extent.is_blocks:
            scratch = writer.scratch()
            computed = self._digest(extent, lambda left: scratch[:left])
            if writer.clone(source, extent):
                with self._lock:
                    self.cloned_length += extent.length
                return computed
            self._clones = False
        return self._digest(extent, writer.space, writer.advance)

    def _digest(
        self,
        extent: Extent,
        space_for: Callable[[int], memoryview],
        advance: Callable[[int], None] | None = None,
    ) -> int:
        """Read an extent piece by piece into the space for its remaining length; check its digest.

        `advance` is called with the length of each piece.
        """
        computed = digest.stream()
        for piece in read_extent(self._inputs, extent, space_for):
            computed.update(piece)
            if advance is not None:
                advance(len(piece))
        self._inputs.check_digest(extent, computed.intdigest())
        return computed.intdigest()


def read_extent(
    inputs: Inputs, extent: Extent, space_for: Callable[[int], memoryview]
) -> Iterator[memoryview]:
    """Yield the bytes of an extent, in the spaces for its remaining length.

    Raises the errors of `inputs`.
    """
    offset, left = extent.input_offset, extent.length
    while left:
        space = space_for(left)
        length = inputs.read_into(extent.input, offset, space)
        yield space[:length]
        left -= length
        offset += length


def create(path: Path, *, resume: bool = False) -> int:
    """Create a file, locked, and return its descriptor; with `resume` it may exist.

    Raises OSError, and RequestError if another process writes it.
    """
    # A file that is there already is not the planned one, wherever it came from.
    flags = os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL) | os.O_NOFOLLOW
    descriptor = open_regular(path, flags)
    try:
        lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _OpenFile:
    """A new file that threads write runs of; `begin` and `end` under the copier's lock."""

    def __init__(self, file: NewFile, target: Path, resume: bool) -> None:
        self.name = file.name
        self.descriptor = create(target / file.name, resume=resume)
        if os.fstat(self.descriptor).st_size > file.length:
            os.ftruncate(self.descriptor, file.length)
        self.digests = array("Q")
        self._run_count = 0
        self._has_all_begun = False

    def begin(self, run: Run) -> None:
        """Count a run that a thread is about to write."""
        self.digests.extend([0] * len(run.extents))
        self._run_count += 1
        self._has_all_begun = run.is_last

    def end(self, run: Run, digests: list[int]) -> bool:
        """Enter the digests of a run that was written; return whether it was the last one."""
        self.digests[run.first : run.first + len(digests)] = array("Q", digests)
        self._run_count -= 1
        return self._has_all_begun and not self._run_count

    def close(self) -> None:
        """Close the file, whole or not."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


Work = Iterator[tuple[_OpenFile, Run]]
"""The runs that are left to write; advanced under the copier's lock."""
