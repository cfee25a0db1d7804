"""The two sides of a unit: the files of the pack, and the shards.

Both read, write, sync and forget; what was written is read back from the disk, not from memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moepack import digest
from moepack.errors import MachineError, MoepackError, SourceError
from moepack.packing.units import Piece, Unit
from moepack.storage.atomic import sync_directory
from moepack.storage.regular_file import open_regular

BUFFER_LENGTH = 512 << 10


class Side(ABC):
    """Open files; number N is that of `paths`. `fault` is the error for what cannot be read."""

    flags = os.O_RDWR | os.O_NOFOLLOW

    def __init__(self, paths: Sequence[Path], fault: type[MoepackError]) -> None:
        self.paths = paths
        self._fault = fault
        self._descriptors: dict[int, int] = {}

    @abstractmethod
    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the file that a piece is in, and where it begins there."""

    def descriptor(self, file: int) -> int:
        """Return the descriptor of a file; it is opened when it is first asked for."""
        if file not in self._descriptors:
            self._descriptors[file] = open_regular(self.paths[file], self.flags)
        return self._descriptors[file]

    def files(self, unit: Unit) -> set[int]:
        """Return the numbers of the files that a unit has pieces in."""
        return {self.place(piece)[0] for piece in unit.pieces}

    def open(self, unit: Unit) -> None:
        """Open what a unit needs, before threads ask for it."""
        for file in self.files(unit):
            self.descriptor(file)

    def read(self, file: int, offset: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a range, through `buffer`."""
        descriptor, end = self.descriptor(file), offset + length
        while offset < end:
            place = f"byte {offset:,}"
            try:
                count = os.preadv(descriptor, [buffer[: end - offset]], offset)
            except OSError as error:
                problem = f"cannot read: {error.strerror}"
                raise self._fault(problem, path=self.paths[file], place=place) from error
            if not count:
                raise self._fault("the file became shorter", path=self.paths[file], place=place)
            yield buffer[:count]
            offset += count

    def write(self, file: int, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at `offset`."""
        data = memoryview(data)
        while data:
            count = os.pwrite(self.descriptor(file), data, offset)
            data, offset = data[count:], offset + count

    def digest(self, piece: Piece) -> int:
        """Compute the digest of a piece from what is read."""
        computed = digest.stream()
        buffer = memoryview(bytearray(min(BUFFER_LENGTH, piece.length)))
        for data in self.read(*self.place(piece), piece.length, buffer):
            computed.update(data)
        return computed.intdigest()

    def sync(self, files: Iterable[int]) -> None:
        """Make files, and their names, outlive a loss of power."""
        for file in sorted(files):
            os.fsync(self.descriptor(file))
        sync_directory(self.paths[0].parent)

    def forget(self, files: Iterable[int]) -> None:
        """Drop what the system has cached of files, so that they are read from the disk."""
        for file in files:
            os.posix_fadvise(self.descriptor(file), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class ShardSide(Side):
    """The shards, under the names that they have meanwhile."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths, SourceError)

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the shard of a piece, and where it begins there."""
        return piece.shard, piece.shard_offset


class PackSide(Side):
    """The data files of the pack, as far as they are written."""

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths, MachineError)

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the data file of a piece, and where it begins there."""
        return piece.file, piece.offset

    def files(self, unit: Unit) -> set[int]:
        """Return the one file that a unit is in."""
        return {unit.file}

    def pad(self, unit: Unit) -> None:
        """Write zeros where a unit has no piece."""
        for start, end in _gaps(unit):
            for position in range(start, end, BUFFER_LENGTH):
                self.write(unit.file, position, bytes(min(BUFFER_LENGTH, end - position)))

    def is_padded(self, unit: Unit) -> bool:
        """Say whether there are zeros where a unit has no piece."""
        buffer = memoryview(bytearray(BUFFER_LENGTH))
        return all(
            data.tobytes().count(0) == len(data)
            for start, end in _gaps(unit)
            for data in self.read(unit.file, start, end - start, buffer)
        )

    def truncate(self, unit: Unit) -> None:
        """Give up a unit, and what is behind it in its file."""
        os.ftruncate(self.descriptor(unit.file), unit.start)


def _gaps(unit: Unit) -> Iterator[tuple[int, int]]:
    position = unit.start
    for piece in unit.pieces:
        if piece.offset > position:
            yield position, piece.offset
        position = piece.end
    if unit.end > position:
        yield position, unit.end
