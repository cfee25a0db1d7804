"""The items of a pack that are in a folder: by a record, or by their bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from moepack.common.phases import Progress
from moepack.common.sizes import gaps
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.partial import PartialRecord
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

    def named(self, record: PartialRecord | None) -> set[int]:
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

    def named_before(self, record: PartialRecord) -> set[int]:
        """Return the items that a record names, whatever became of their files."""
        ranges = {name: RangeSet(file.ranges) for name, file in record.files.items()}
        return {
            number
            for number, item in enumerate(self._items)
            if (of_file := ranges.get(self._names[item.file])) is not None
            and of_file.covers(item.start, item.end)
        }

    def compare(self, numbers: Collection[int], threads: int, progress: Progress) -> None:
        """Read items, and add to `here` those with their digests. Raises OSError."""
        by_file: dict[int, list[int]] = {}
        for number in sorted(numbers):
            by_file.setdefault(self._items[number].file, []).append(number)

        def compare(file: int, advance: Callable[[int], None]) -> list[int]:
            return self._right(file, by_file[file], advance)

        files = [f for f in by_file if _allocated_length(self._folder / self._names[f])]
        total = sum(self.part_length(by_file[file]) for file in files)
        for right in run_each(compare, files, threads, lambda done: progress(done, total)):
            self.here.update(right)
            self.compared.update(right)

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

    def _right(
        self, file: int, numbers: Sequence[int], advanced: Callable[[int], None]
    ) -> list[int]:
        """Return which items of a file have their digests there."""
        path = self._folder / self._names[file]
        extents = [extent for number in numbers for extent in self._items[number].extents]
        computed = iter(digests_of(path, extents, advanced))
        right = []
        for number in numbers:
            expected = [extent.digest for extent in self._items[number].extents]
            if [next(computed) for _ in expected] == expected:
                right.append(number)
        return right


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
