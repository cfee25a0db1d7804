"""A copy of some items of a pack in a folder: what a pull and a mirror do alike.

What is there already is found, by a record or by its digests; the rest is copied, each part checked
as it arrives; all of it can be read back. Long ranges are read, many at a time, and written where
they belong as they come, so memory does not depend on their lengths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, remedy
from moepack.common.phases import Progress
from moepack.common.sizes import gaps
from moepack.pack.reading import copy_record
from moepack.pack.reading.copy_record import CopiedFile, CopyRecord
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import ItemRun, PackedItem, length_of, ranges_of, runs_of
from moepack.storage.atomic import publish, sync_directory, write_synced
from moepack.storage.extents import Extent, digests_of, is_zero
from moepack.storage.folders import check_space
from moepack.storage.input_file import InputFile, open_input
from moepack.storage.ranges import RangeSet
from moepack.storage.regular_file import open_regular, write_at
from moepack.storage.thread_pool import SharedProgress, ThreadPool, run_each

_SYNC_LENGTH = 1 << 30
"""Bytes after which what has come is synced and named."""
_PIECE_LENGTH = 512 << 10
_ATTEMPTS = 3
"""How often bytes are asked for that have the wrong digest."""


class SubsetCopy:
    """The copy in `folder` of some of the `items` of an open pack, by their numbers.

    `here` are the items that are there, and `compared` those that were found to have their digests
    in this run. `wrong_padding` are ranges of files that have to be zeros, and are not.
    """

    def __init__(self, pack: Pack, folder: Path, items: Sequence[PackedItem]) -> None:
        self.here: set[int] = set()
        self.compared: set[int] = set()
        self.wrong_padding: list[tuple[int, int, int]] = []
        self._pack = pack
        self._folder = folder
        self._items = items
        self._names = [file.name for file in pack.index.files]
        self._lengths = [file.length for file in pack.index.files]
        self._inputs: dict[int, InputFile] = {}
        self._opening = threading.Lock()

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
        """Return whether a file has the bytes of an item; those that cannot be read are wrong."""
        extents = self._items[number].extents
        try:
            computed = digests_of(path, extents, advanced)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return list(computed) == [extent.digest for extent in extents]

    def fetch(
        self,
        missing: Collection[int],
        files: Iterable[int],
        threads: int,
        progress: Progress,
        synced: Callable[[Mapping[str, CopiedFile]], None] | None = None,
    ) -> int:
        """Copy missing items into these `files`, by their numbers; return the bytes that were read.

        The files are made if needed. However it ends, `synced` is called with what is there; so it
        is now and then before. Raises PackError for wrong bytes, MachineError if they cannot be
        read or there is no room for them, and OSError.
        """
        runs = list(runs_of(self._items, missing))
        total = sum(run.length for run in runs)
        allocated_length = sum(_allocated_length(self._folder / name) for name in self._names)
        all_length = length_of(self._items, self.here.union(missing))
        check_space(self._folder, min(total, all_length - allocated_length))
        shared = SharedProgress(lambda done: progress(done, total))
        with ExitStack() as stack:
            stack.callback(self._close_inputs)
            descriptors = self._open_files(files, stack)
            self._clear_padding(descriptors)

            def sync() -> None:
                for descriptor in descriptors.values():
                    os.fsync(descriptor)
                if synced is not None:
                    synced(self._present_files(descriptors))

            try:
                with ThreadPool(max_workers=threads) as executor:
                    try:
                        self._fetch_runs(executor, threads, runs, descriptors, shared, sync)
                    except BaseException:
                        shared.stop()
                        raise
            except BaseException:
                with contextlib.suppress(OSError):
                    sync()
                raise
            sync()
        return total

    def _open_files(self, files: Iterable[int], stack: ExitStack) -> dict[int, int]:
        """Open files, and make those that are missing; return their descriptors."""
        descriptors = {}
        for number in files:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = open_regular(self._folder / self._names[number], flags)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_size != self._lengths[number]:
                os.ftruncate(descriptor, self._lengths[number])
            descriptors[number] = descriptor
        sync_directory(self._folder)
        return descriptors

    def _clear_padding(self, descriptors: Mapping[int, int]) -> None:
        for file, start, end in self.wrong_padding:
            for offset in range(start, end, _PIECE_LENGTH):
                write_at(descriptors[file], bytes(min(_PIECE_LENGTH, end - offset)), offset)

    def _fetch_runs(
        self,
        executor: ThreadPool,
        threads: int,
        runs: Iterable[ItemRun],
        descriptors: Mapping[int, int],
        advance: SharedProgress,
        sync: Callable[[], None],
    ) -> None:
        in_flight: dict[Future[None], ItemRun] = {}
        unsynced_length = 0
        for run in runs:
            future = executor.submit(self._fetch, run, descriptors[run.file], advance)
            in_flight[future] = run
            if len(in_flight) == threads:
                unsynced_length += self._end_some(in_flight)
            if unsynced_length >= _SYNC_LENGTH:
                sync()
                unsynced_length = 0
        while in_flight:
            self._end_some(in_flight)

    def _end_some(self, in_flight: dict[Future[None], ItemRun]) -> int:
        """Wait for some runs to end, add their items to `here`, and return their bytes."""
        length = 0
        for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
            run = in_flight.pop(future)
            future.result()
            self.here.update(run.numbers)
            self.compared.update(run.numbers)
            length += run.length
        return length

    def _present_files(self, descriptors: Mapping[int, int]) -> dict[str, CopiedFile]:
        ranges = ranges_of(self._pack.index, self._items, self.here)
        return {
            name: CopiedFile(os.fstat(descriptors[number]).st_mtime_ns, ranges.get(name, ()))
            for number, name in enumerate(self._names)
            if number in descriptors
        }

    def _fetch(self, run: ItemRun, descriptor: int, advance: SharedProgress) -> None:
        """Write the extents of a run as they come; ask again for those that are wrong."""
        left = list(run.extents)
        attempt = 0
        counted_end = left[0].offset
        while left:
            try:
                for position in self._stream(run.file, left, descriptor):
                    if position > counted_end:
                        advance(position - counted_end)
                        counted_end = position
            except _WrongBytesError as error:
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise self._wrong(error.extent, error.computed) from None

    def _stream(self, file: int, left: list[Extent], descriptor: int) -> Iterator[int]:
        """Write extents from the first of `left` on; yield the offset after each piece.

        Extents that are written and right are removed from `left`. Raises _WrongBytesError.
        """
        position = left[0].offset
        computed = digest.stream()
        for piece in self._pieces(file, position, left[-1].end - position):
            view = memoryview(piece)
            end = position + len(view)
            while left and left[0].offset < end:
                extent = left[0]
                start, stop = max(extent.offset, position), min(extent.end, end)
                part = view[start - position : stop - position]
                computed.update(part)
                write_at(descriptor, part, start)
                if stop < extent.end:
                    break
                if computed.intdigest() != extent.digest:
                    raise _WrongBytesError(extent, computed.intdigest())
                computed.reset()
                left.pop(0)
            position = end
            yield position
        if left:
            path, place = self._pack.file_paths[file], f"byte {position:,}"
            raise PackError("the file became shorter", path=path, place=place)

    def _pieces(self, file: int, offset: int, length: int) -> Iterator[bytes]:
        try:
            yield from self._input(file).stream(offset, length)
        except OSError as error:
            raise _cannot_read(error, self._pack.file_paths[file], f"byte {offset:,}") from None

    def _input(self, file: int) -> InputFile:
        """Return an open file of the pack. Raises PackError for one of another length."""
        with self._opening:
            if file in self._inputs:
                return self._inputs[file]
            path, expected = self._pack.file_paths[file], self._lengths[file]
            try:
                opened = open_input(path)
            except FileNotFoundError:
                raise PackError("a data file is missing", path=path) from None
            except OSError as error:
                raise _cannot_read(error, path, None) from None
            self._inputs[file] = opened
        if opened.stamp.length != expected:
            raise PackError(
                "the file is not as long as the manifest says",
                path=path,
                expected=f"{expected:,} bytes",
                found=f"{opened.stamp.length:,}",
            )
        return opened

    def _close_inputs(self) -> None:
        while self._inputs:
            self._inputs.popitem()[1].close()

    def _wrong(self, extent: Extent, computed: int) -> MoepackError:
        assert extent.digest is not None
        return PackError(
            "the bytes do not have the digest in the index",
            path=self._pack.file_paths[extent.input],
            place=f"{extent.label} at byte {extent.offset:,}",
            expected=digest.to_text(extent.digest),
            found=digest.to_text(computed),
            hint=f"the pack may be damaged: see with `moepack verify {self._pack.path}`",
        )


class _WrongBytesError(Exception):
    """An extent has come with another digest."""

    def __init__(self, extent: Extent, computed: int) -> None:
        super().__init__(extent.label)
        self.extent = extent
        self.computed = computed


def write_record(path: Path, record: CopyRecord) -> None:
    """Write a record to `path`, whole and synced. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_synced(temporary, copy_record.encode(record))
    publish(temporary, path)


def _cannot_read(error: OSError, path: Path, place: str | None) -> MachineError:
    problem = f"cannot read: {error.strerror}"
    return MachineError(problem, path=path, place=place, hint=remedy(error))


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
