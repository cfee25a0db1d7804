"""Copy extents into new files: the one hot loop of packing, restoring and exporting.

Threads take runs of any file and write them at their planned offsets, through a small buffer that
stays in the processor's cache: bytes are read into it, digested there, and written from it. Memory
does not depend on the size of an expert or of the model, and one large file keeps all of them busy.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Self

from moepack import digest
from moepack.errors import MachineError, MoepackError, is_shortage
from moepack.storage.extents import Extent, NewFile, Run, runs
from moepack.storage.regular_file import FileStamp, open_regular
from moepack.storage.thread_pool import ThreadPool

BUFFER_LENGTH = 512 << 10
RUN_LENGTH = 8 << 20


class WrittenFile(NamedTuple):
    """A file that is whole and synced: the digests of its extents in the order of offsets."""

    name: str
    digests: array[int]


class CanceledError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


class InputFile(NamedTuple):
    """A file that is read; `stamp` is what it was when it was planned, None where that is open."""

    path: str
    stamp: FileStamp | None = None


class Inputs:
    """The open input files of a copy, for positioned reads from any thread.

    `fault` is the error for an input that cannot be read, is too short or has changed.
    """

    def __init__(self, files: Sequence[InputFile], fault: type[MoepackError]) -> None:
        self._files = files
        self._fault = fault
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        try:
            for file in self._files:
                self._descriptors.append(open_regular(file.path))
            self.check_unchanged()
        except OSError as error:
            self.__exit__()
            raise MachineError(f"cannot open: {error.strerror}", path=error.filename) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def read_into(self, number: int, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes from `offset` of an input; 0 never comes back."""
        path, place = self._files[number].path, f"byte {offset:,}"
        try:
            length = os.preadv(self._descriptors[number], [buffer], offset)
        except OSError as error:
            kind = MachineError if is_shortage(error) else self._fault
            raise kind(f"cannot read: {error.strerror}", path=path, place=place) from error
        if not length:
            raise self._fault("the file became shorter", path=path, place=place)
        return length

    def check_unchanged(self) -> None:
        """Raise `fault` where an input is not the file any more that was planned with."""
        for file, descriptor in zip(self._files, self._descriptors, strict=True):
            if file.stamp is not None and not _is_unchanged(file, descriptor):
                raise self._fault(
                    "the file changed while it was being read",
                    path=file.path,
                    hint="wait until it is complete, then begin again from the start",
                )


def _is_unchanged(file: InputFile, descriptor: int) -> bool:
    """Say whether both the open file and the one at its path are what was planned with."""
    try:
        at_path = FileStamp.of(os.stat(file.path))
    except OSError:
        return False
    return FileStamp.of(os.fstat(descriptor)) == file.stamp == at_path


class Copier:
    """Fills new files in the folder `target` from `inputs`; `write` does it.

    `advanced` is called with the bytes done since its last call, from one thread at a time.
    """

    def __init__(self, target: Path, inputs: Inputs, advanced: Callable[[int], None]) -> None:
        self._target = target
        self._inputs = inputs
        self._advanced = advanced
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
            making = _FileInMaking(file.name, self._target)
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
            writer = _RunWriter(making.descriptor, run, buffer, self._advance)
            for number, extent in enumerate(run.extents, run.first):
                making.digests[number] = self._copy(extent, writer)
            writer.finish()
            with self._lock:
                is_whole = making.end()
            if is_whole:
                done.put(making.finish())

    def _copy(self, extent: Extent, writer: _RunWriter) -> int:
        """Copy one extent and return its digest."""
        writer.pad_to(extent.offset)
        offset, left = extent.input_offset, extent.length
        computed = digest.stream()
        while left:
            space = writer.space(left)
            length = self._inputs.read_into(extent.input, offset, space)
            computed.update(space[:length])
            writer.advance(length)
            left -= length
            offset += length
        return computed.intdigest()

    def _advance(self, length: int) -> None:
        if self._stop.is_set():
            raise CanceledError
        with self._progress_lock:
            self._advanced(length)


class _FileInMaking:
    """A new file that threads write runs of; `begin` and `end` under the copier's lock."""

    def __init__(self, name: str, target: Path) -> None:
        # A file that stands there already is not what was planned, wherever it came from.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(target / name, flags, 0o644)
        self.digests = array("Q")
        self._name = name
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


class _RunWriter:
    """Writes one run from its start to its end through a buffer."""

    def __init__(
        self, descriptor: int, run: Run, buffer: memoryview, advanced: Callable[[int], None]
    ) -> None:
        self._descriptor = descriptor
        self._end = run.end
        self._buffer = buffer
        self._advanced = advanced
        self._flushed = run.start
        self._filled = 0

    def space(self, limit: int) -> memoryview:
        """Return free space of up to `limit` bytes, one at least, behind what was written."""
        if self._filled == len(self._buffer):
            self._flush()
        return self._buffer[self._filled : min(len(self._buffer), self._filled + limit)]

    def advance(self, length: int) -> None:
        """Count the first `length` bytes of the space as written."""
        self._filled += length

    def pad_to(self, offset: int) -> None:
        """Write zeros up to `offset` from the start of the file."""
        while (missing := offset - self._flushed - self._filled) > 0:
            space = self.space(missing)
            space[:] = bytes(len(space))
            self.advance(len(space))

    def finish(self) -> None:
        """Write what is left."""
        self.pad_to(self._end)
        self._flush()

    def _flush(self) -> None:
        self._advanced(self._filled)
        ready, offset = self._buffer[: self._filled], self._flushed
        self._flushed += self._filled
        self._filled = 0
        while ready:
            length = os.pwrite(self._descriptor, ready, offset)
            _start_writing_back(self._descriptor, offset, length)
            ready, offset = ready[length:], offset + length


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Find the system call in the C library; None on systems other than Linux."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2


def _start_writing_back(descriptor: int, offset: int, length: int) -> None:
    """Let the drive begin now instead of at the sync: half the time of a pack on a disk.

    It promises nothing, so what it returns does not matter: the sync at the end decides.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def digests_of(path: Path, extents: Iterator[Extent]) -> array[int]:
    """Compute the digests of a written file's extents anew, from its bytes. Raises OSError."""
    buffer = memoryview(bytearray(BUFFER_LENGTH))
    digests = array("Q")
    descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb", buffering=0) as file:
        for extent in extents:
            computed = digest.stream()
            offset = extent.offset
            while offset < extent.end:
                piece = buffer[: min(BUFFER_LENGTH, extent.end - offset)]
                length = os.preadv(file.fileno(), [piece], offset)
                if not length:
                    break
                computed.update(piece[:length])
                offset += length
            digests.append(computed.intdigest())
    return digests
