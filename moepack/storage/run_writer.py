"""Write a run of a new file: bytes at their planned offsets, zeros between them, or a clone."""

import ctypes
import os
from collections.abc import Callable

from moepack.storage import libc
from moepack.storage.extents import Extent
from moepack.storage.sharing import clone_range

_sync_file_range = libc.function(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_SYNC_FILE_RANGE_WRITE = 2


class RunWriter:
    """Writes an open file from `start` to `end` through a buffer."""

    def __init__(
        self,
        descriptor: int,
        start: int,
        end: int,
        buffer: memoryview,
        advanced: Callable[[int], None],
    ) -> None:
        self._descriptor = descriptor
        self._end = end
        self._buffer = buffer
        self._advanced = advanced
        self._flushed = start
        self._filled = 0

    def space(self, limit: int) -> memoryview:
        """Return free space of up to `limit` bytes, one at least, behind the bytes so far."""
        if self._filled == len(self._buffer):
            self._flush()
        return self._buffer[self._filled : min(len(self._buffer), self._filled + limit)]

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

    def scratch(self) -> memoryview:
        """Flush the buffer, and return it for other use until the next call."""
        self._flush()
        return self._buffer

    def clone(self, source: int, extent: Extent) -> bool:
        """Share an extent with the open file `source`; return whether the file system did."""
        offset, length = extent.input_offset, extent.length
        if not clone_range(source, offset, length, self._descriptor, extent.offset):
            return False
        self._advanced(length)
        self._flushed += length
        return True

    def finish(self) -> None:
        """Write the rest."""
        self.pad_to(self._end)
        self._flush()

    def _flush(self) -> None:
        self._advanced(self._filled)
        ready, offset = self._buffer[: self._filled], self._flushed
        self._flushed += self._filled
        self._filled = 0
        while ready:
            length = os.pwrite(self._descriptor, ready, offset)
            if _sync_file_range is not None:
                # The drive begins now instead of at the sync: half the time of a pack on a disk. It
                # promises nothing, so its result does not matter: the sync at the end decides.
                _sync_file_range(self._descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
            ready, offset = ready[length:], offset + length
