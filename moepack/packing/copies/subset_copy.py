"""A copy of some items of a pack in a folder: what a pull and a mirror do alike.

What is there already is found, by a record or by its digests; the rest is copied, each part checked
as it arrives; all of it can be read back. Long ranges are read, many at a time, and written where
they belong as they come, so memory does not depend on their lengths.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError, PackError
from moepack.common.phases import DigestCounts, Progress
from moepack.common.sizes import gaps
from moepack.pack.reading.copies import CopiedFile, CopyRecord, encode
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import packed_items, ranges_of, runs_of
from moepack.storage.atomic import publish, sync_directory, write_synced
from moepack.storage.extents import Extent, RangeSet, digests_of, is_zero
from moepack.storage.folders import check_space
from moepack.storage.inputs import Inputs
from moepack.storage.page_cache import drop
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
    in this run. `by_part` makes an item of each part.
    """

    def __init__(self, pack: Pack, folder: Path, *, by_part: bool = False) -> None:
        self.items = packed_items(pack.index)
        if by_part:
            self.items = [
                item._replace(start=extent.offset, end=extent.end, extents=(extent,))
                for item in self.items
                for extent in item.extents
            ]
        self.all = set(range(len(self.items)))
        self.here: set[int] = set()
        self.compared: set[int] = set()
        self._wrong_padding: list[tuple[int, int, int]] = []
        self._pack = pack
        self._folder = folder
        self._names = [file.name for file in pack.index.files]
        self._lengths = [file.length for file in pack.index.files]

    def require_pack(self) -> None:
        """Raise PackError if the pack is an index over shards, or has no digests."""
        for file in self._pack.index.files:
            if file.is_shard or not file.has_digests:
                problem = "an index over shards" if file.is_shard else "has no digests"
                path = self._pack.index.path
                raise PackError(problem, path=path, place=file.name, expected="a pack")

    def length(self, numbers: Iterable[int]) -> int:
        """Return the bytes of items, padding included."""
        return sum(self.items[number].length for number in numbers)

    def part_length(self, numbers: Iterable[int]) -> int:
        """Return the bytes of items without their padding."""
        return sum(extent.length for n in numbers for extent in self.items[n].extents)

    def digest_counts(self, numbers: Iterable[int]) -> DigestCounts:
        """Return the counts of items, and of those among all that were compared."""
        return DigestCounts(
            known_length=self.part_length(numbers), compared_length=self.part_length(self.compared)
        )

    def named(self, record: CopyRecord | None, *, unchanged: bool = True) -> set[int]:
        """Return the items that a record names; if `unchanged`, in files as they were then."""
        if record is None:
            return set()
        ranges = []
        for name, length in zip(self._names, self._lengths, strict=True):
            is_trusted = not unchanged
            if unchanged and name in record.files:
                status = _status(self._folder / name)
                now = None if status is None else (status.st_size, status.st_mtime_ns)
                is_trusted = now == (length, record.files[name].mtime_ns)
            ranges.append(RangeSet(record.ranges(name) if is_trusted else ()))
        return {
            number
            for number, item in enumerate(self.items)
            if ranges[item.file].covers(item.start, item.end)
        }

    def find(self, numbers: Collection[int], threads: int, progress: Progress) -> None:
        """Compare those items whose files have any bytes. Raises OSError."""
        lengths = [_allocated_length(self._folder / name) for name in self._names]
        self.compare([n for n in numbers if lengths[self.items[n].file]], threads, progress)

    def drop_cached(self, files: Iterable[int]) -> None:
        """Drop files from the page cache, so that reads of them reach the drive."""
        paths = (self._folder / self._names[file] for file in sorted(files))
        drop(path for path in paths if path.is_file())

    def compare(self, numbers: Collection[int], threads: int, progress: Progress) -> set[int]:
        """Read items, add to `here` those with their digests, and return them. Raises OSError."""
        by_file: dict[int, list[int]] = {}
        for number in sorted(numbers):
            by_file.setdefault(self.items[number].file, []).append(number)

        def compare(file: int, advance: Callable[[int], None]) -> list[int]:
            path = self._folder / self._names[file]
            return [number for number in by_file[file] if self._is_right(path, number, advance)]

        total = self.part_length(numbers)
        lists = run_each(compare, [*by_file], threads, lambda done: progress(done, total))
        right = {number for one in lists for number in one}
        self.here |= right
        self.compared |= right
        return right

    def prove(
        self,
        numbers: Collection[int],
        threads: int,
        progress: Progress,
        advice: str = "the copy is not used",
    ) -> None:
        """Read items back from the drive. Raises MachineError for one that is wrong, and OSError.

        What was written may have gone astray, or nowhere, on a drive that fails. `advice` ends the
        hint.
        """
        self.drop_cached({self.items[number].file for number in numbers})
        for number in sorted(set(numbers) - self.compare(numbers, threads, progress)):
            item = self.items[number]
            raise MachineError(
                "the drive returned other bytes than were written",
                path=self._folder / self._names[item.file],
                place=item.extents[0].label,
                hint=f"the drive or the memory is failing: {advice}",
            )

    def _is_right(self, path: Path, number: int, advanced: Callable[[int], None]) -> bool:
        """Return whether a file has the bytes of an item; those that cannot be read are wrong."""
        extents = self.items[number].extents
        try:
            computed = digests_of(path, extents, advanced)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return list(computed) == [extent.digest for extent in extents]

    def find_wrong_padding(self) -> int:
        """Find the bytes between parts that are not zeros; return how many, and those too many.

        `fetch` clears them. Raises OSError.
        """
        buffer = memoryview(bytearray(_PIECE_LENGTH))
        parts: list[list[tuple[int, int]]] = [[] for _ in self._names]
        for item in self.items:
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
                        self._wrong_padding.append((file, start, end))
                        wrong_length += end - start
        return wrong_length

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
        runs = list(runs_of(self.items, missing))
        total = sum(map(self._run_length, runs))
        allocated_length = sum(_allocated_length(self._folder / name) for name in self._names)
        all_length = self.length(self.here.union(missing))
        check_space(self._folder, min(total, all_length - allocated_length))
        with ExitStack() as stack:
            descriptors = self._open_files(files, stack)
            for file, start, end in self._wrong_padding:
                for offset in range(start, end, _PIECE_LENGTH):
                    zeros = bytes(min(_PIECE_LENGTH, end - offset))
                    write_at(descriptors[file], zeros, offset)
            sync = partial(self._sync, descriptors, synced)
            advance = SharedProgress(lambda done: progress(done, total))
            try:
                self._fetch_runs(runs, descriptors, threads, advance, sync)
            except BaseException:
                with contextlib.suppress(OSError):
                    sync()
                raise
            sync()
        return total

    def _sync(
        self,
        descriptors: Mapping[int, int],
        synced: Callable[[Mapping[str, CopiedFile]], None] | None,
    ) -> None:
        """Sync files, and report what is there in them."""
        for descriptor in descriptors.values():
            os.fsync(descriptor)
        if synced is None:
            return
        ranges = ranges_of(self._pack.index, self.items, self.here)
        present = {}
        for number, descriptor in descriptors.items():
            name, mtime_ns = self._names[number], os.fstat(descriptor).st_mtime_ns
            present[name] = CopiedFile(mtime_ns, ranges.get(name, ()))
        synced(present)

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

    def _fetch_runs(
        self,
        runs: Collection[Sequence[int]],
        descriptors: Mapping[int, int],
        threads: int,
        advance: SharedProgress,
        sync: Callable[[], None],
    ) -> None:
        """Copy runs in threads; add those that have ended to `here`."""
        files = sorted({self.items[run[0]].file for run in runs})
        unsynced_length = 0
        with Inputs([self._pack.file_paths[file] for file in files], PackError) as inputs:
            for number, file in enumerate(files):
                if inputs.length(number) != self._lengths[file]:
                    raise PackError(
                        "the file is not as long as the manifest says",
                        path=inputs.paths[number],
                        expected=f"{self._lengths[file]:,} bytes",
                        found=f"{inputs.length(number):,}",
                    )
            with ThreadPool(threads, advance) as executor:
                futures = {}
                for run in runs:
                    file = self.items[run[0]].file
                    source, target = files.index(file), descriptors[file]
                    future = executor.submit(self._fetch, inputs, source, run, target, advance)
                    futures[future] = run
                for future in as_completed(futures):
                    future.result()
                    self.here.update(futures[future])
                    self.compared.update(futures[future])
                    unsynced_length += self._run_length(futures[future])
                    if unsynced_length >= _SYNC_LENGTH:
                        sync()
                        unsynced_length = 0

    def _fetch(
        self, inputs: Inputs, number: int, run: Iterable[int], target: int, advance: SharedProgress
    ) -> None:
        """Write the items of a run as they come; ask again for those that are wrong."""
        left = [extent for item in run for extent in self.items[item].extents]
        counted_end = left[0].offset
        for _ in range(_ATTEMPTS):
            position, computed = left[0].offset, digest.stream()
            for piece in inputs.stream(number, position, left[-1].end - position):
                if not _write(target, left, position, memoryview(piece), computed):
                    break
                position += len(piece)
                if position > counted_end:
                    advance(position - counted_end)
                    counted_end = position
            if not left:
                return
        raise PackError(
            "the bytes do not have the digest in the index",
            path=inputs.paths[number],
            place=f"{left[0].label} at byte {left[0].offset:,}",
            expected=digest.to_text(left[0].digest or 0),
            found=digest.to_text(computed.intdigest()),
            hint=f"the pack may be damaged: see with `moepack verify {self._pack.path}`",
        )

    def _run_length(self, run: Sequence[int]) -> int:
        """Return the bytes from the first part of a run to the last."""
        return self.items[run[-1]].extents[-1].end - self.items[run[0]].extents[0].offset


def _write(
    target: int, left: list[Extent], position: int, piece: memoryview, computed: digest.stream
) -> bool:
    """Write a piece of a file from `position` on; return whether the extents in it are right.

    These are removed from `left`; bytes between extents are dropped.
    """
    end = position + len(piece)
    while left and left[0].offset < end:
        extent = left[0]
        start, stop = max(extent.offset, position), min(extent.end, end)
        part = piece[start - position : stop - position]
        computed.update(part)
        write_at(target, part, start)
        if stop < extent.end:
            break
        if computed.intdigest() != extent.digest:
            return False
        computed.reset()
        left.pop(0)
    return True


def write_record(path: Path, record: CopyRecord) -> None:
    """Write a record to `path`, whole and synced. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_synced(temporary, encode(record))
    publish(temporary, path)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _allocated_length(path: Path) -> int:
    """Return the bytes that a file takes on its drive, 0 if there is none."""
    status = _status(path)
    return 0 if status is None else status.st_blocks * 512
