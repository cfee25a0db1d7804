"""Read one data file from start to end and compare it: digests, padding, the source's bytes.

One pass over the file: each piece is read once into a buffer that stays in the processor's cache,
and everything that is to be known about it is computed there.
"""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moepack import digest
from moepack.errors import MachineError, SourceError, is_shortage
from moepack.storage.regular_file import open_regular
from moepack.verifying.report import Finding

PIECE_LENGTH = 512 << 10


class SliceExtent(NamedTuple):
    """The bytes of a part in the source: offset from the start of the shard, length in bytes."""

    path: str
    offset: int
    length: int


class PartExtent(NamedTuple):
    """A part as the index places it: offset from the start of the data file, length in bytes.

    `slice` is None where the part is not compared with the source.
    """

    offset: int
    length: int
    digest: int
    layer: int
    expert: int
    part: str
    slice: SliceExtent | None = None


class _ShortFileError(Exception):
    """The file ended before it should."""


class _StoppedError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


class FileScan:
    """The scan of one data file; `run` does it and leaves the totals here.

    `digest` is that of the whole file, None where it could not be read as a whole.
    """

    def __init__(self, path: Path, length: int, extents: list[PartExtent]) -> None:
        self.path = path
        self.length = length
        self.extents = extents
        self.read_length = 0
        self.compared_length = 0
        self.digest: int | None = None
        self._findings: list[Finding] = []
        self._position = 0
        self._file_digest = digest.stream()
        self._descriptors: dict[str, int] = {}

    def run(self, advanced: Callable[[int], None], stop: threading.Event) -> list[Finding]:
        """Read the file and return all findings; `advanced` is told of the bytes read.

        Raises SourceError and MachineError for what is not the pack's fault.
        """
        self._advanced = advanced
        self._stop = stop
        self._ours = np.empty(PIECE_LENGTH, np.uint8)
        self._theirs = np.empty(PIECE_LENGTH, np.uint8)
        with ExitStack() as stack:
            try:
                self._descriptor = open_regular(self.path)
            except OSError as error:
                self._find_failure("open", error, 0)
                return self._findings
            stack.callback(os.close, self._descriptor)
            stack.callback(self._close_shards)
            self._check_length()
            try:
                self._run()
            except _ShortFileError:
                self._find("file", "ends inside this range", self._position)
            except OSError as error:
                self._find_failure("read", error, self._position)
        return self._findings

    def _run(self) -> None:
        for extent in self.extents:
            self._check_padding(extent.offset)
            self._check_part(extent)
        self._check_padding(self.length)
        if self._position == self.length:
            self.digest = self._file_digest.intdigest()

    def _check_length(self) -> None:
        length = os.fstat(self._descriptor).st_size
        if length != self.length:
            message = f"is {length} bytes long, the index says {self.length}"
            self._find("file", message, min(length, self.length))

    def _find(self, kind: str, message: str, offset: int, extent: PartExtent | None = None) -> None:
        name = self.path.name
        if extent is None:
            self._findings.append(Finding(kind, message, file=name, offset=offset))
            return
        where = (extent.layer, extent.expert, extent.part, name, offset)
        self._findings.append(Finding(kind, message, *where))

    def _find_failure(self, what: str, error: OSError, offset: int) -> None:
        """Report what the system said of the file; a machine that is short of something raises."""
        message = f"cannot {what}: {error.strerror}"
        if is_shortage(error):
            raise MachineError(message, path=self.path) from None
        self._find("file", message, offset)

    def _read(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Read the next piece, at most PIECE_LENGTH bytes of `length`."""
        piece = self._ours[: min(length, PIECE_LENGTH)]
        _fill(self._descriptor, piece, offset)
        if offset == self._position:
            self._file_digest.update(piece.data)
            self._position += len(piece)
        self.read_length += len(piece)
        self._advanced(len(piece))
        if self._stop.is_set():
            raise _StoppedError
        return piece

    def _check_padding(self, end: int) -> None:
        while self._position < end:
            at = self._position
            piece = self._read(at, end - at)
            if piece.any():
                first = at + int(np.flatnonzero(piece)[0])
                self._find("padding", f"holds {piece[first - at]:#04x}, not zero", first)

    def _check_part(self, extent: PartExtent) -> None:
        part_digest = digest.stream()
        differs = False
        for at in range(0, extent.length, PIECE_LENGTH):
            piece = self._read(extent.offset + at, extent.length - at)
            part_digest.update(piece.data)
            if extent.slice is not None and not differs:
                differs = self._differs(extent, at, piece)
        computed = part_digest.intdigest()
        if computed != extent.digest:
            message = f"its digest is {digest.to_text(computed)}, "
            message += f"the index says {digest.to_text(extent.digest)}"
            self._find("digest", message, extent.offset, extent)

    def _differs(self, extent: PartExtent, at: int, piece: npt.NDArray[np.uint8]) -> bool:
        """Compare a piece with the source; report the first byte of the part that differs."""
        assert extent.slice is not None
        path, start, length = extent.slice
        piece = piece[: max(0, length - at)]
        theirs = self._theirs[: len(piece)]
        try:
            _fill(self._shard(path), theirs, start + at)
        except _ShortFileError:
            raise SourceError("ends too early", path=path, place=f"byte {start + at}") from None
        except OSError as error:
            kind = MachineError if is_shortage(error) else SourceError
            raise kind(f"cannot read: {error.strerror}", path=path) from None
        self.compared_length += len(piece)
        if _equal(piece, theirs):
            return False
        first = int(np.flatnonzero(piece != theirs)[0])
        message = (
            f"byte {at + first} of the part is {piece[first]:#04x}, the source has "
            f"{theirs[first]:#04x} at byte {start + at + first} of {os.path.basename(path)}"
        )
        self._find("bytes", message, extent.offset + at + first, extent)
        return True

    def _close_shards(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _shard(self, path: str) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = open_regular(path)
        return self._descriptors[path]


def _equal(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8]) -> bool:
    """Compare eight bytes at a time, then the rest: faster than all bytes one by one."""
    whole = len(ours) & ~7
    words = ours[:whole].view(np.uint64), theirs[:whole].view(np.uint64)
    return np.array_equal(*words) and np.array_equal(ours[whole:], theirs[whole:])


def _fill(descriptor: int, buffer: npt.NDArray[np.uint8], offset: int) -> None:
    view = buffer.data
    while view:
        length = os.preadv(descriptor, [view], offset)
        if not length:
            raise _ShortFileError
        view = view[length:]
        offset += length
