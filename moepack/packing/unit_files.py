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
from moepack.reading.shard_map import ShardMap
from moepack.sizes import gaps
from moepack.storage.atomic import sync_directory
from moepack.storage.regular_file import open_regular

BUFFER_LENGTH = 512 << 10


class Side(ABC):
    """Open files; number N is that of `paths`, where None is a file that is not there.

    `fault` is the error for what cannot be read. Nothing is created or changed unless `writable`.
    """

    flags = os.O_NOFOLLOW

    def __init__(
        self, paths: Sequence[Path | None], fault: type[MoepackError], writable: bool
    ) -> None:
        self.paths = list(paths)
        self._fault = fault
        self._flags = self.flags | os.O_RDWR if writable else os.O_NOFOLLOW | os.O_RDONLY
        self._descriptors: dict[int, int] = {}

    @abstractmethod
    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the file that a piece is in, and where it begins there."""

    def path(self, file: int) -> Path:
        """Return the path of a file that is there."""
        path = self.paths[file]
        assert path is not None
        return path

    def descriptor(self, file: int) -> int:
        """Return the descriptor of a file; it is opened when it is first needed."""
        if file not in self._descriptors:
            self._descriptors[file] = open_regular(self.path(file), self._flags)
        return self._descriptors[file]

    def files(self, unit: Unit) -> set[int]:
        """Return the numbers of the files that a unit has pieces in."""
        return {self.place(piece)[0] for piece in unit.pieces}

    def open(self, files: Iterable[int]) -> None:
        """Open files, before threads need them."""
        for file in files:
            self.descriptor(file)

    def open_all(self) -> None:
        """Open all files that are there; those that are not become None in `paths`."""
        for file, path in enumerate(self.paths):
            if path is not None and not os.path.lexists(path):
                self.paths[file] = None
        self.open(file for file, path in enumerate(self.paths) if path is not None)

    def drop(self, file: int) -> None:
        """Close a file, and take it for one that is not there."""
        self.paths[file] = None
        if file in self._descriptors:
            os.close(self._descriptors.pop(file))

    def reaches(self, piece: Piece) -> bool:
        """Return whether the file of a piece is there, and long enough to hold it."""
        file, offset = self.place(piece)
        if self.paths[file] is None:
            return False
        return os.fstat(self.descriptor(file)).st_size >= offset + piece.length

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

    def read_piece(self, piece: Piece) -> Iterator[memoryview]:
        """Yield the bytes of a piece, through one buffer."""
        buffer = memoryview(bytearray(min(BUFFER_LENGTH, piece.length)))
        return self.read(*self.place(piece), piece.length, buffer)

    def write(self, file: int, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at `offset`."""
        data = memoryview(data)
        while data:
            count = os.pwrite(self.descriptor(file), data, offset)
            data, offset = data[count:], offset + count

    def digest(self, piece: Piece) -> int:
        """Compute the digest of a piece from what is read."""
        computed = digest.stream()
        for data in self.read_piece(piece):
            computed.update(data)
        return computed.intdigest()

    def sync(self, files: Iterable[int]) -> None:
        """Make files, and their names, outlive a loss of power."""
        folders = set()
        for file in sorted(files):
            os.fsync(self.descriptor(file))
            folders.add(self.path(file).parent)
        for folder in folders:
            sync_directory(folder)

    def forget(self, files: Iterable[int]) -> None:
        """Drop what the system has cached of files, so that they are read from the disk."""
        for file in files:
            os.posix_fadvise(self.descriptor(file), 0, 0, os.POSIX_FADV_DONTNEED)

    def forget_all(self) -> None:
        """Drop what the system has cached of all open files."""
        self.forget(list(self._descriptors))

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _is_zero(self, file: int, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return whether all bytes of ranges are there, and zero."""
        size = os.fstat(self.descriptor(file)).st_size
        buffer = memoryview(bytearray(BUFFER_LENGTH))
        for start, end in ranges:
            if end > size:
                return False
            for data in self.read(file, start, end - start, buffer):
                if data.tobytes().count(0) != len(data):
                    return False
        return True

    def _fill_with_zeros(self, file: int, ranges: Iterable[tuple[int, int]]) -> None:
        for start, end in ranges:
            for position in range(start, end, BUFFER_LENGTH):
                self.write(file, position, bytes(min(BUFFER_LENGTH, end - position)))


class ShardSide(Side):
    """The shards, under the names that they have meanwhile."""

    def __init__(self, paths: Sequence[Path | None], *, writable: bool = False) -> None:
        super().__init__(paths, SourceError, writable)

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the shard of a piece, and where it begins there."""
        return piece.shard, piece.shard_offset

    def round_off(self, file: int, mapped: ShardMap) -> None:
        """Put right what of a shard is no piece of it: zeros between them, and its length."""
        os.ftruncate(self.descriptor(file), mapped.length)
        padding = list(gaps(0, mapped.length, ((p.shard_offset, p.end) for p in mapped.pieces)))
        if not self._is_zero(file, padding):
            self._fill_with_zeros(file, padding)
            self.sync({file})


class PackSide(Side):
    """The data files of the pack, as far as they are written."""

    flags = os.O_NOFOLLOW | os.O_CREAT

    def __init__(self, paths: Sequence[Path | None], *, writable: bool = False) -> None:
        super().__init__(paths, MachineError, writable)

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the data file of a piece, and where it begins there."""
        return piece.file, piece.offset

    def files(self, unit: Unit) -> set[int]:
        """Return the one file that a unit is in."""
        return {unit.file}

    def pad(self, unit: Unit) -> None:
        """Write zeros where a unit has no piece."""
        self._fill_with_zeros(unit.file, _padding(unit))

    def is_padded(self, unit: Unit) -> bool:
        """Return whether there are zeros where a unit has no piece."""
        return self._is_zero(unit.file, _padding(unit))

    def length_behind(self, file: int, offset: int) -> int:
        """Return how many bytes a file has behind `offset`; 0 where there is no file."""
        if not os.path.lexists(self.path(file)):
            return 0
        return max(0, os.fstat(self.descriptor(file)).st_size - offset)

    def truncate(self, file: int, length: int) -> bool:
        """Cut a file off at `length`; return whether it was longer."""
        if not self.length_behind(file, length):
            return False
        os.ftruncate(self.descriptor(file), length)
        return True


def _padding(unit: Unit) -> Iterator[tuple[int, int]]:
    return gaps(unit.start, unit.end, ((piece.offset, piece.end) for piece in unit.pieces))
