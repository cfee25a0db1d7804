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
from moepack.storage.clone import BLOCK
from moepack.storage.extents import Extent, NewFile, Run, runs
from moepack.storage.inputs import Inputs
from moepack.storage.run_writer import RunWriter
from moepack.storage.stored_extents import is_right
from moepack.storage.thread_pool import ThreadPool

BUFFER_LENGTH = 512 << 10
RUN_LENGTH = 8 << 20


class WrittenFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets."""

    name: str
    digests: array[int]


class CanceledError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


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
        self._advanced = advanced
        self._resume = resume
        self._clones = clone
        self.cloned_length = 0
        self.kept_length = 0
        self._lock = threading.Lock()
        self._making: list[_FileInMaking] = []
        self._progress_lock = threading.Lock()
        self._stop = threading.Event()

    def write(
        self, files: Sequence[NewFile], threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        """Write and sync `files` with `threads`; call `finished` after each, in this thread.

        The first failure, or an interruption, stops all threads and is raised.
        """
        done: queue.SimpleQueue[WrittenFile | Future[None]] = queue.SimpleQueue()
        with ThreadPool(max_workers=threads) as executor:
            try:
                work = self._work(files)
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
                self._stop.set()
                executor.shutdown(cancel_futures=True)
                raise
            finally:
                executor.shutdown()
                for making in self._making:
                    making.close()

    def _work(self, files: Sequence[NewFile]) -> Iterator[tuple[_FileInMaking, Run]]:
        """Yield runs, those of a file one after the other; create each file before its first."""
        for file in files:
            making = _FileInMaking(file, self._target, self._resume)
            self._making.append(making)
            for run in runs(file, RUN_LENGTH):
                making.begin(run)
                yield making, run

    def _run(
        self,
        work: Iterator[tuple[_FileInMaking, Run]],
        done: queue.SimpleQueue[WrittenFile | Future[None]],
    ) -> None:
        """Copy runs until there are none left."""
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
                done.put(making.finish())

    def _keep(self, making: _FileInMaking, run: Run) -> None:
        for number, extent in enumerate(run.extents, run.first):
            making.digests[number] = extent.digest or 0
        self._advance(run.end - run.start)
        with self._lock:
            self.kept_length += run.end - run.start

    def _copy(self, extent: Extent, writer: RunWriter) -> int:
        """Copy one extent and return its digest; raise where that is not the one expected."""
        writer.pad_to(extent.offset)
        computed = digest.stream()
        if self._can_clone(extent):
            scratch = writer.scratch()
            for piece in self._read(extent, lambda left: scratch[:left]):
                computed.update(piece)
            self._check(extent, computed.intdigest())
            self._clone(extent, writer)
            return computed.intdigest()
        for piece in self._read(extent, writer.space):
            computed.update(piece)
            writer.advance(len(piece))
        self._check(extent, computed.intdigest())
        return computed.intdigest()

    def _read(self, extent: Extent, space_for: Callable[[int], memoryview]) -> Iterator[memoryview]:
        """Read an extent piece by piece into the space that is given for what is left."""
        offset, left = extent.input_offset, extent.length
        while left:
            space = space_for(left)
            length = self._inputs.read_into(extent.input, offset, space)
            yield space[:length]
            left -= length
            offset += length

    def _check(self, extent: Extent, computed: int) -> None:
        if extent.digest is not None and extent.digest != computed:
            raise self._inputs.damaged(extent, computed)

    def _can_clone(self, extent: Extent) -> bool:
        places = extent.offset | extent.input_offset | extent.length
        is_file = self._inputs.descriptor(extent.input) is not None
        return self._clones and is_file and extent.length > 0 and places % BLOCK == 0

    def _clone(self, extent: Extent, writer: RunWriter) -> None:
        """Clone an extent that was read and is right; copy it where that is refused."""
        source = self._inputs.descriptor(extent.input)
        if source is not None and writer.clone(source, extent):
            with self._lock:
                self.cloned_length += extent.length
            return
        self._clones = False
        for piece in self._read(extent, writer.space):
            writer.advance(len(piece))

    def _advance(self, length: int) -> None:
        if self._stop.is_set():
            raise CanceledError
        with self._progress_lock:
            self._advanced(length)


class _FileInMaking:
    """A new file that threads write runs of; `begin` and `end` under the copier's lock."""

    def __init__(self, file: NewFile, target: Path, resume: bool) -> None:
        # A file that stands there already is not what was planned, wherever it came from.
        flags = os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL) | os.O_NOFOLLOW
        self.descriptor = os.open(target / file.name, flags | os.O_CLOEXEC, 0o644)
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
        """Sync and close the file."""
        os.fsync(self.descriptor)
        self.close()
        return WrittenFile(self._name, self.digests)

    def close(self) -> None:
        """Close the file, whole or not."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)
