"""The two file sets that units are moved between: the files of the pack, and the shards."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, SourceError
from moepack.common.sizes import gaps
from moepack.pack.reading.shard_map import ShardMap
from moepack.packing.in_place.units import Piece, Unit
from moepack.storage.atomic import sync_directory
from moepack.storage.extents import is_zero
from moepack.storage.regular_file import open_regular, write_at

_BUFFER_LENGTH = 512 << 10


class FileSet(ABC):
    """Open files; number N is that of `paths`, None for a file that is not there.

    Nothing is created or changed unless `writable`.
    """

    fault: ClassVar[type[MoepackError]]
    """The error for a file that cannot be read."""
    flags = os.O_NOFOLLOW

    def __init__(self, paths: Sequence[Path | None], *, writable: bool = False) -> None:
        self.paths = list(paths)
        self._flags = self.flags | os.O_RDWR if writable else os.O_NOFOLLOW | os.O_RDONLY
        self._descriptors: dict[int, int] = {}

    @abstractmethod
    def locate(self, piece: Piece) -> tuple[int, int]:
        """Return the file that a piece is in, and its offset there."""

    def descriptor(self, file: int) -> int:
        """Return the descriptor of a file; it is opened when it is first needed."""
        if file not in self._descriptors:
            path = self.paths[file]
            assert path is not None
            self._descriptors[file] = open_regular(path, self._flags)
        return self._descriptors[file]

    def files(self, unit: Unit) -> set[int]:
        """Return the numbers of the files that a unit has pieces in."""
        return {self.locate(piece)[0] for piece in unit.pieces}

    def open(self, files: Iterable[int]) -> None:
        """Open files, before threads need them."""
        for file in files:
            self.descriptor(file)

    def open_all(self) -> None:
        """Open all files that are there; the path of a missing one becomes None."""
        for file, path in enumerate(self.paths):
            if path is not None and not os.path.lexists(path):
                self.paths[file] = None
        self.open(file for file, path in enumerate(self.paths) if path is not None)

    def drop(self, file: int) -> None:
        """Close a file, and treat it as missing."""
        self.paths[file] = None
        if file in self._descriptors:
            os.close(self._descriptors.pop(file))

    def reaches(self, piece: Piece) -> bool:
        """Return whether the file of a piece is there, and long enough to hold it."""
        file, offset = self.locate(piece)
        if self.paths[file] is None:
            return False
        return os.fstat(self.descriptor(file)).st_size >= offset + piece.length

    def read_piece(self, piece: Piece) -> Iterator[memoryview]:
        """Yield the bytes of a piece, through one buffer."""
        file, offset = self.locate(piece)
        buffer = memoryview(bytearray(min(_BUFFER_LENGTH, piece.length)))
        descriptor, end = self.descriptor(file), offset + piece.length
        while offset < end:
            place = f"byte {offset:,}"
            try:
                count = os.preadv(descriptor, [buffer[: end - offset]], offset)
            except OSError as error:
                problem = f"cannot read: {error.strerror}"
                raise self.fault(problem, path=self.paths[file], place=place) from error
            if not count:
                raise self.fault("the file became shorter", path=self.paths[file], place=place)
            yield buffer[:count]
            offset += count

    def write(self, file: int, offset: int, data: memoryview | bytes) -> None:
        """Write bytes at `offset`."""
        write_at(self.descriptor(file), data, offset)

    def digest(self, piece: Piece) -> int:
        """Read a piece and return its digest."""
        computed = digest.stream()
        for data in self.read_piece(piece):
            computed.update(data)
        return computed.intdigest()

    def sync(self, files: Iterable[int]) -> None:
        """Make files, and their names, outlive a loss of power."""
        files = sorted(files)
        for file in files:
            os.fsync(self.descriptor(file))
        for folder in {path.parent for file in files if (path := self.paths[file])}:
            sync_directory(folder)

    def drop_cached(self, files: Iterable[int] | None = None) -> None:
        """Drop files, by default all open ones, from the page cache."""
        for file in list(self._descriptors) if files is None else files:
            os.posix_fadvise(self.descriptor(file), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _is_zero(self, file: int, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return whether all bytes of ranges are there, and zero."""
        descriptor, buffer = self.descriptor(file), memoryview(bytearray(_BUFFER_LENGTH))
        return all(is_zero(descriptor, start, end, buffer) for start, end in ranges)

    def _fill_with_zeros(self, file: int, ranges: Iterable[tuple[int, int]]) -> None:
        for start, end in ranges:
            for position in range(start, end, _BUFFER_LENGTH):
                self.write(file, position, bytes(min(_BUFFER_LENGTH, end - position)))


class ShardFiles(FileSet):
    """The shards, under the names that they have meanwhile."""

    fault = SourceError

    def locate(self, piece: Piece) -> tuple[int, int]:
        """Return the shard of a piece, and its offset there."""
        return piece.shard, piece.shard_offset

    def round_off(self, maps: Iterable[ShardMap]) -> None:
        """Give the shards their lengths, and zeros between their pieces."""
        for file, mapped in enumerate(maps):
            descriptor = self.descriptor(file)
            padding = list(gaps(0, mapped.length, ((p.offset, p.end) for p in mapped.pieces)))
            if os.fstat(descriptor).st_size != mapped.length or not self._is_zero(file, padding):
                os.ftruncate(descriptor, mapped.length)
                self._fill_with_zeros(file, padding)
                self.sync({file})


class PackFiles(FileSet):
    """The data files of the pack, as far as they are written."""

    fault = MachineError
    flags = os.O_NOFOLLOW | os.O_CREAT

    def locate(self, piece: Piece) -> tuple[int, int]:
        """Return the data file of a piece, and its offset there."""
        return piece.file, piece.offset

    def files(self, unit: Unit) -> set[int]:
        """Return the one file that a unit is in."""
        return {unit.file}

    def pad(self, unit: Unit) -> None:
        """Write zeros between the pieces of a unit."""
        self._fill_with_zeros(unit.file, _padding(unit))

    def is_padded(self, unit: Unit) -> bool:
        """Return whether there are zeros between the pieces of a unit."""
        return self._is_zero(unit.file, _padding(unit))

    def length_behind(self, file: int, offset: int) -> int:
        """Return how many bytes a file has behind `offset`; 0 without a file."""
        path = self.paths[file]
        if path is None or not os.path.lexists(path):
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
