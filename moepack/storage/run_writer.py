"""Write a run of a new file: bytes at their planned offsets, zeros between them, or a clone."""

import ctypes
import os
from collections.abc import Callable

from moepack.storage.clone import clone_range
from moepack.storage.extents import Extent, Run


class RunWriter:
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

    def write(self, data: bytes | bytearray) -> None:
        """Write some bytes."""
        rest = memoryview(data)
        while rest:
            space = self.space(len(rest))
            space[:] = rest[: len(space)]
            self.advance(len(space))
            rest = rest[len(space) :]

    def pad_to(self, offset: int) -> None:
        """Write zeros up to `offset` from the start of the file."""
        assert offset >= self._flushed + self._filled, "extents overlap, or are not in order"
        while (missing := offset - self._flushed - self._filled) > 0:
            space = self.space(missing)
            space[:] = bytes(len(space))
            self.advance(len(space))

    def scratch(self) -> memoryview:
        """Write what is there, and return the buffer for other use until the next call."""
        self._flush()
        return self._buffer

    def clone(self, source: int, extent: Extent) -> bool:
        """Share an extent with the open file `source`; say whether the file system did."""
        place = (extent.input_offset, extent.length)
        if not clone_range(source, *place, self._descriptor, extent.offset):
            return False
        self._advanced(extent.length)
        self._flushed += extent.length
        return True

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
