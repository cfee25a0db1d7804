"""Copy slices from shards into data files: the one hot loop of packing.

Files are written from start to end, several at a time, through small buffers that stay in the
processor's cache: slices are read into them, digested there, and written from them. Memory does not
depend on the size of an expert or of the model.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Self

from moepack import digest
from moepack.errors import MachineError, SourceError, is_shortage
from moepack.packing.journal import FinishedFile
from moepack.packing.plan import Plan, PlannedBlob, PlannedFile
from moepack.source.experts import SourcePart
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.regular_file import FileStamp, open_regular
from moepack.storage.thread_pool import ThreadPool

BUFFER_LENGTH = 1 << 20


class CanceledError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


class OpenShards:
    """The open shards of a source, for positioned reads from any thread."""

    def __init__(self, source: Source) -> None:
        self._headers = source.shards
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        try:
            for header in self._headers:
                self._descriptors.append(open_regular(header.path))
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

    def read_into(self, shard: int, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes from `offset` of a shard; 0 never comes back."""
        path = self._headers[shard].path
        try:
            length = os.preadv(self._descriptors[shard], [buffer], offset)
        except OSError as error:
            kind = MachineError if is_shortage(error) else SourceError
            place = f"byte {offset}"
            raise kind(f"cannot read: {error.strerror}", path=path, place=place) from error
        if not length:
            raise SourceError("the file became shorter", path=path, place=f"byte {offset}")
        return length

    def check_unchanged(self) -> None:
        """Raise SourceError where a shard is not the file any more whose header was read."""
        for header, descriptor in zip(self._headers, self._descriptors, strict=True):
            if not _is_unchanged(header, descriptor):
                raise SourceError(
                    "the file changed while it was being packed",
                    path=header.path,
                    hint="wait until it is complete, then pack again from the start",
                )


def _is_unchanged(header: GgufHeader, descriptor: int) -> bool:
    """Say whether both the open file and the one at its path are what the header was read from."""
    try:
        at_path = FileStamp.of(os.stat(header.path))
    except OSError:
        return False
    return FileStamp.of(os.fstat(descriptor)) == header.stamp == at_path


class DataFileCopier:
    """Fills the data files of a plan from the shards; `write` does it.

    `advanced` is called with the bytes done since its last call, from one thread at a time.
    """

    def __init__(
        self, plan: Plan, target: Path, shards: OpenShards, advanced: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._target = target
        self._shards = shards
        self._advanced = advanced
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def write(
        self, files: Sequence[PlannedFile], threads: int, finished: Callable[[FinishedFile], None]
    ) -> None:
        """Write and sync `files`, `threads` at a time; call `finished` after each, in this thread.

        The first failure, or an interruption, stops all threads and is raised.
        """
        with ThreadPool(max_workers=threads) as executor:
            try:
                for future in as_completed([executor.submit(self._write, f) for f in files]):
                    finished(future.result())
            except BaseException:
                self._stop.set()
                executor.shutdown(cancel_futures=True)
                raise

    def _write(self, file: PlannedFile) -> FinishedFile:
        with DigestingWriter(self._target / file.name, self._advance) as writer:
            part_digests = array("Q")
            for blob in file.blobs:
                self._write_blob(writer, blob, part_digests)
            writer.pad_to(file.length)
            return FinishedFile(file.name, writer.finish(), part_digests)

    def _write_blob(
        self, writer: DigestingWriter, blob: PlannedBlob, part_digests: array[int]
    ) -> None:
        template = self._plan.templates[blob.template]
        for part, offset_in_blob in zip(template.parts, template.offsets_in_blob, strict=True):
            writer.pad_to(blob.offset + offset_in_blob)
            part_digests.append(self._write_part(writer, part, blob.expert))

    def _write_part(self, writer: DigestingWriter, part: SourcePart, expert: int) -> int:
        shard, offset = part.slices.at(expert)
        part_digest = digest.stream()
        left = part.length
        while left:
            space = writer.space(left)
            length = self._shards.read_into(shard, offset, space)
            part_digest.update(space[:length])
            writer.advance(length)
            left -= length
            offset += length
        return part_digest.intdigest()

    def _advance(self, length: int) -> None:
        if self._stop.is_set():
            raise CanceledError
        with self._lock:
            self._advanced(length)


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


class DigestingWriter:
    """Writes one new file from start to end, and digests it on the way.

    Two buffers take turns: while one is being filled from the source, a thread of the file's own
    digests and writes the other. So a single large file keeps two processors busy.
    """

    def __init__(self, path: Path, advanced: Callable[[int], None]) -> None:
        self._advanced = advanced
        # A file that stands there already is not what was planned, wherever it came from.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._buffers = [memoryview(bytearray(BUFFER_LENGTH)) for _ in range(2)]
        self._filled = 0
        self._flushed = 0
        self._digest = digest.stream()
        self._thread = ThreadPool(max_workers=1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()
        os.close(self._descriptor)

    def space(self, limit: int) -> memoryview:
        """Return free space of up to `limit` bytes, one at least, behind what was written."""
        if self._filled == BUFFER_LENGTH:
            self._flush()
        return self._buffers[0][self._filled : min(BUFFER_LENGTH, self._filled + limit)]

    def advance(self, length: int) -> None:
        """Count the first `length` bytes of the space as written."""
        self._filled += length

    def pad_to(self, offset: int) -> None:
        """Write zeros up to `offset` from the start of the file."""
        while (missing := offset - self._flushed - self._filled) > 0:
            space = self.space(missing)
            space[:] = bytes(len(space))
            self.advance(len(space))

    def finish(self) -> int:
        """Write what is left, sync the file, and return its digest."""
        self._flush()
        self._wait()
        os.fsync(self._descriptor)
        return self._digest.intdigest()

    def _flush(self) -> None:
        """Hand the filled buffer to the thread, once it is done with the other one."""
        self._wait()
        self._advanced(self._filled)
        ready = self._buffers[0][: self._filled]
        self._writing = self._thread.submit(self._write, ready, self._flushed)
        self._flushed += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, ready: memoryview, offset: int) -> None:
        self._digest.update(ready)
        while ready:
            length = os.pwrite(self._descriptor, ready, offset)
            _start_writing_back(self._descriptor, offset, length)
            ready, offset = ready[length:], offset + length
