"""The items of a pack that are in a folder: by a record, or by their bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from moepack.common.phases import Progress
from moepack.common.sizes import gaps
from moepack.pack.reading.copy_record import CopyRecord
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import PackedItem
from moepack.storage.extents import digests_of, is_zero
from moepack.storage.ranges import RangeSet
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 512 << 10


class PresentItems:
    """The items of `pack` in `folder`, by their numbers in `items`.

    `here` are all of them, and `compared` those that were found to have their digests in this run.
    `wrong_padding` are ranges of files that have to be zeros, and are not.
    """

    def __init__(self, pack: Pack, folder: Path, items: Sequence[PackedItem]) -> None:
        self.here: set[int] = set()
        self.compared: set[int] = set()
        self.wrong_padding: list[tuple[int, int, int]] = []
        self._folder = folder
        self._items = items
        self._names = [file.name for file in pack.index.files]
        self._lengths = [file.length for file in pack.index.files]

    def named(self, record: CopyRecord | None) -> set[int]:
        """Return the items that a record names in files with the length and mtime of then."""
        if record is None:
            return set()
        lengths = dict(zip(self._names, self._lengths, strict=True))
        stamps = {name: _stamp(self._folder / name) for name in record.files}
        unchanged = {
            name: file
            for name, file in record.files.items()
            if stamps[name] == (lengths.get(name), file.mtime_ns)
        }
        return self.named_before(record._replace(files=unchanged))

    def named_before(self, record: CopyRecord) -> set[int]:
        """Return the items that a record names, whatever became of their files."""
        ranges = [RangeSet(record.ranges(name)) for name in self._names]
        return {
            number
            for number, item in enumerate(self._items)
            if ranges[item.file].covers(item.start, item.end)
        }

    def find(self, numbers: Collection[int], threads: int, progress: Progress) -> None:
        """Compare those items whose files have any bytes. Raises OSError."""
        lengths = [_allocated_length(self._folder / name) for name in self._names]
        self.compare([n for n in numbers if lengths[self._items[n].file]], threads, progress)

    def compare(self, numbers: Collection[int], threads: int, progress: Progress) -> set[int]:
        """Read items, add to `here` those with their digests, and return them. Raises OSError."""
        by_file: dict[int, list[int]] = {}
        for number in sorted(numbers):
            by_file.setdefault(self._items[number].file, []).append(number)

        def compare(file: int, advance: Callable[[int], None]) -> list[int]:
            path = self._folder / self._names[file]
            return [number for number in by_file[file] if self._is_right(path, number, advance)]

        total = self.part_length(numbers)
        lists = run_each(compare, [*by_file], threads, lambda done: progress(done, total))
        right = {number for one in lists for number in one}
        self.here |= right
        self.compared |= right
        return right

    def allocated_length(self) -> int:
        """Return the bytes that the files take on their drive."""
        return sum(_allocated_length(self._folder / name) for name in self._names)

    def part_length(self, numbers: Iterable[int]) -> int:
        """Return the bytes of items without their padding."""
        return sum(extent.length for n in numbers for extent in self._items[n].extents)

    def find_wrong_padding(self) -> int:
        """Find the bytes between parts that are not zeros; return how many, and those too many.

        Raises OSError.
        """
        buffer = memoryview(bytearray(_PIECE_LENGTH))
        parts: list[list[tuple[int, int]]] = [[] for _ in self._names]
        for item in self._items:
            parts[item.file] += [(extent.offset, extent.end) for extent in item.extents]
        wrong_length = 0
        for file, (name, length) in enumerate(zip(self._names, self._lengths, strict=True)):
            path = self._folder / name
            if not _allocated_length(path):
                continue
            descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
            with open(descriptor, "rb", buffering=0):
                actual_length = os.fstat(descriptor).st_size
                wrong_length += abs(actual_length - length)
                for start, end in gaps(0, min(length, actual_length), parts[file]):
                    if not is_zero(descriptor, start, end, buffer):
                        self.wrong_padding.append((file, start, end))
                        wrong_length += end - start
        return wrong_length

    def _is_right(self, path: Path, number: int, advanced: Callable[[int], None]) -> bool:
        """Return whether an item has its digests in a file; bytes that cannot be read are wrong."""
        extents = self._items[number].extents
        try:
            computed = digests_of(path, extents, advanced)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return list(computed) == [extent.digest for extent in extents]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the length and the mtime of a file, None if there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
        return status.st_size, status.st_mtime_ns
    except FileNotFoundError:
        return None


def _allocated_length(path: Path) -> int:
    """Return the bytes that a file takes on its drive, 0 if there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
