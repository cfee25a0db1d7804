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

from moepack import digest
from moepack.storage.extents import Extent, NewFile, Run, runs
from moepack.storage.inputs import Inputs
from moepack.storage.lock import lock
from moepack.storage.regular_file import open_regular
from moepack.storage.run_writer import RunWriter
from moepack.storage.stored_extents import is_right
from moepack.storage.thread_pool import SharedProgress, ThreadPool

BUFFER_LENGTH = 512 << 10


class WrittenFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets."""

    name: str
    digests: array[int]


class Copier:
    """Fills new files in the folder `target` from `inputs`; `write` does it.

    With `resume` a file may be there in part: a run that is right already is left as it is, as far
    as the digests of its extents are known. With `clone` ranges are shared with the inputs where
    the file system can. `advanced` is called with the bytes done since its last call, from one
    thread at a time.
    """

    def __init__(
        self,
        target: Path,
        inputs: Inputs,
        advanced: Callable[[int], None],
        *,
        resume: bool = False,
        clone: bool = False,
    ) -> None:
        self._target = target
        self._inputs = inputs
        self._advance = SharedProgress(advanced)
        self._resume = resume
        self._clones = clone
        self.cloned_length = 0
        self.kept_length = 0
        self._lock = threading.Lock()
        self._making: dict[str, _FileInMaking] = {}

    def write(
        self, files: Sequence[NewFile], threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        """Write and sync `files` with `threads`; call `finished` after each, in this thread.

        Each file is locked until `finished` has returned. The first failure, or an interruption,
        stops all threads and is raised; RequestError where another process writes one of them.
        """
        work = self._work(files)

        def release(written: WrittenFile) -> None:
            finished(written)
            self._making.pop(written.name).close()

        try:
            if threads == 1:
                for written in self._written(work):
                    release(written)
            else:
                self._write_in_threads(work, threads, release)
        finally:
            for making in self._making.values():
                making.close()

    def _write_in_threads(
        self, work: Work, threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        done: queue.SimpleQueue[WrittenFile | Future[None]] = queue.SimpleQueue()
        with ThreadPool(max_workers=threads) as executor:
            try:
                for _ in range(threads):
                    executor.submit(self._run, work, done).add_done_callback(done.put)
                while threads:
                    item = done.get()
                    if isinstance(item, WrittenFile):
                        finished(item)
                    else:
                        item.result()
                        threads -= 1
            except BaseException:
                self._advance.stop()
                executor.shutdown(cancel_futures=True)
                raise

    def _run(self, work: Work, done: queue.SimpleQueue[WrittenFile | Future[None]]) -> None:
        for written in self._written(work):
            done.put(written)

    def _work(self, files: Sequence[NewFile]) -> Work:
        """Yield runs, those of a file one after the other; create each file before its first."""
        for file in files:
            making = _FileInMaking(file, self._target, self._resume)
            self._making[file.name] = making
            for run in runs(file):
                making.begin(run)
                yield making, run

    def _written(self, work: Work) -> Iterator[WrittenFile]:
        """Copy runs until there are none left; yield each file that is whole with one of them."""
        buffer = memoryview(bytearray(BUFFER_LENGTH))
        while True:
            with self._lock:
                taken = next(work, None)
            if taken is None:
                return
            making, run = taken
            if self._resume and is_right(making.descriptor, run, buffer):
                self._keep(making, run)
            else:
                writer = RunWriter(making.descriptor, run, buffer, self._advance)
                for number, extent in enumerate(run.extents, run.first):
                    making.digests[number] = self._copy(extent, writer)
                writer.finish()
            with self._lock:
                is_whole = making.end()
            if is_whole:
                yield making.finish()

    def _keep(self, making: _FileInMaking, run: Run) -> None:
        for number, extent in enumerate(run.extents, run.first):
            making.digests[number] = extent.digest or 0
        self._advance(run.end - run.start)
        with self._lock:
            self.kept_length += run.end - run.start

    def _copy(self, extent: Extent, writer: RunWriter) -> int:
        """Copy one extent and return its digest; raise where that is not the one expected."""
        writer.pad_to(extent.offset)
        if self._can_clone(extent):
            scratch = writer.scratch()
            computed = self._digest(extent, lambda left: scratch[:left])
            if self._clone(extent, writer):
                return computed
        return self._digest(extent, writer.space, writer.advance)

    def _digest(
        self,
        extent: Extent,
        space_for: Callable[[int], memoryview],
        taken: Callable[[int], None] | None = None,
    ) -> int:
        """Read an extent into the space that is given for what is left of it; check its digest.

        `taken` is called with how much of the space each piece has filled.
        """
        computed = digest.stream()
        for piece in self._read(extent, space_for):
            computed.update(piece)
            if taken is not None:
                taken(len(piece))
        if extent.digest is not None and extent.digest != computed.intdigest():
            raise self._inputs.damaged(extent, computed.intdigest())
        return computed.intdigest()

    def _read(self, extent: Extent, space_for: Callable[[int], memoryview]) -> Iterator[memoryview]:
        """Read an extent piece by piece into the space that is given for what is left."""
        if extent.frame_length:
            yield from self._decode(extent, space_for)
            return
        offset, left = extent.input_offset, extent.length
        while left:
            space = space_for(left)
            length = self._inputs.read_into(extent.input, offset, space)
            yield space[:length]
            left -= length
            offset += length

    def _decode(
        self, extent: Extent, space_for: Callable[[int], memoryview]
    ) -> Iterator[memoryview]:
        """Do as `_read` for an extent that lies in a frame."""
        from moepack.storage.frames import FrameError, FrameStream  # they load the codec

        def read_at(offset: int, length: int) -> bytes:
            return self._inputs.read(extent.input, extent.input_offset + offset, length)

        try:
            content = FrameStream(read_at, extent.frame_length, extent.length)
            left = extent.length
            while left:
                space = space_for(left)
                content.read_into(space)
                yield space
                left -= len(space)
        except FrameError as error:
            raise self._inputs.undecodable(extent, str(error)) from None

    def _can_clone(self, extent: Extent) -> bool:
        is_file = self._inputs.descriptor(extent.input) is not None
        return self._clones and is_file and extent.is_blocks

    def _clone(self, extent: Extent, writer: RunWriter) -> bool:
        """Clone an extent that was read and is right; say whether the file system did."""
        source = self._inputs.descriptor(extent.input)
        if source is None or not writer.clone(source, extent):
            self._clones = False
            return False
        with self._lock:
            self.cloned_length += extent.length
        return True


def create(path: Path, *, resume: bool = False) -> int:
    """Create a file, locked, and return its descriptor; with `resume` it may be there.

    Raises OSError, and RequestError where another process writes it.
    """
    # A file that stands there already is not what was planned, wherever it came from.
    flags = os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL) | os.O_NOFOLLOW
    descriptor = open_regular(path, flags)
    try:
        lock(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _FileInMaking:
    """A new file that threads write runs of; `begin` and `end` under the copier's lock."""

    def __init__(self, file: NewFile, target: Path, resume: bool) -> None:
        self.descriptor = create(target / file.name, resume=resume)
        if os.fstat(self.descriptor).st_size > file.length:
            os.ftruncate(self.descriptor, file.length)
        self.digests = array("Q")
        self._name = file.name
        self._open_count = 0
        self._all_begun = False

    def begin(self, run: Run) -> None:
        """Count a run that a thread is about to write."""
        self.digests.extend([0] * len(run.extents))
        self._open_count += 1
        self._all_begun = run.is_last

    def end(self) -> bool:
        """Count a run that was written; say whether it was the last one."""
        self._open_count -= 1
        return self._all_begun and not self._open_count

    def finish(self) -> WrittenFile:
        """Sync the file."""
        os.fsync(self.descriptor)
        return WrittenFile(self._name, self.digests)

    def close(self) -> None:
        """Close the file, whole or not."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


Work = Iterator[tuple[_FileInMaking, Run]]
"""The runs that are left to write; taken under the copier's lock."""
