"""The files of a partial pack: ranges that come from a store, each part checked as it arrives.

Long ranges are asked for, many at a time, and written where they belong as they come, so memory
does not depend on their lengths. What has come is synced, and then named in `.pull.json`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, remedy
from moepack.pack.reading import partial
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.partial import PartialFile, PartialRecord
from moepack.packing.copies.packed_items import PackedItem
from moepack.packing.copies.present_items import PresentItems
from moepack.storage.atomic import publish, sync_directory, write_synced
from moepack.storage.extents import Extent
from moepack.storage.input_file import InputFile, open_input
from moepack.storage.ranges import merged
from moepack.storage.regular_file import open_regular, write_at
from moepack.storage.thread_pool import SharedProgress, ThreadPool

RUN_LENGTH = 32 << 20
"""About how many bytes are asked for at a time: the hub limits the count of requests."""
_MAX_GAP = 64 << 10
"""Bytes between two items that are asked for and dropped."""
_RECORD_LENGTH = 1 << 30
"""Bytes after which what has come is synced and named."""
_PIECE_LENGTH = 512 << 10
_ATTEMPTS = 3
"""How often bytes are asked for that have the wrong digest."""


class PullRun(NamedTuple):
    """Items of one file that are asked for at once, by their numbers, and their extents."""

    file: int
    numbers: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def length(self) -> int:
        """The bytes from the first extent to the last."""
        return self.extents[-1].end - self.extents[0].offset


class PullCopy:
    """The copy in `folder` of the pack that is open as `pack`; `items` are all of that.

    `record` is written with the items that are `present`, to which those are added that come.
    """

    def __init__(
        self,
        pack: Pack,
        folder: Path,
        items: Sequence[PackedItem],
        record: PartialRecord,
        present: PresentItems,
    ) -> None:
        self._present = present
        self._record = record
        self._pack = pack
        self._folder = folder
        self._items = items
        self._names = [file.name for file in pack.index.files]
        self._inputs: dict[int, InputFile] = {}
        self._opening = threading.Lock()

    def fetch(self, runs: Iterable[PullRun], threads: int, advanced: Callable[[int], None]) -> None:
        """Pull items, and make them present; however it ends, name in the record what has come.

        Raises PackError for wrong bytes, MachineError if the store fails, and OSError.
        """
        shared = SharedProgress(advanced)
        with ExitStack() as stack:
            stack.callback(self._close_inputs)
            descriptors = self._open_files(stack)
            self._clear_padding(descriptors)
            try:
                with ThreadPool(max_workers=threads) as executor:
                    try:
                        self._fetch_runs(executor, threads, runs, descriptors, shared)
                    except BaseException:
                        shared.stop()
                        raise
            except BaseException:
                with contextlib.suppress(OSError):
                    self.write_record(descriptors)
                raise
            self.write_record(descriptors)

    def _open_files(self, stack: ExitStack) -> dict[int, int]:
        """Open the files, and make those that are missing; return their descriptors."""
        descriptors = {}
        for number, file in enumerate(self._pack.index.files):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = open_regular(self._folder / file.name, flags)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_size != file.length:
                os.ftruncate(descriptor, file.length)
            descriptors[number] = descriptor
        sync_directory(self._folder)
        return descriptors

    def _clear_padding(self, descriptors: Mapping[int, int]) -> None:
        for file, start, end in self._present.wrong_padding:
            for offset in range(start, end, _PIECE_LENGTH):
                write_at(descriptors[file], bytes(min(_PIECE_LENGTH, end - offset)), offset)

    def _fetch_runs(
        self,
        executor: ThreadPool,
        threads: int,
        runs: Iterable[PullRun],
        descriptors: Mapping[int, int],
        advance: SharedProgress,
    ) -> None:
        in_flight: dict[Future[None], PullRun] = {}
        unnamed_length = 0
        for run in runs:
            future = executor.submit(self._fetch, run, descriptors[run.file], advance)
            in_flight[future] = run
            if len(in_flight) == threads:
                unnamed_length += self._end_some(in_flight)
            if unnamed_length >= _RECORD_LENGTH:
                self.write_record(descriptors)
                unnamed_length = 0
        while in_flight:
            self._end_some(in_flight)

    def _end_some(self, in_flight: dict[Future[None], PullRun]) -> int:
        """Wait for some runs to end, add their items to `here`, and return their bytes."""
        length = 0
        for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
            run = in_flight.pop(future)
            future.result()
            self._present.here.update(run.numbers)
            self._present.compared.update(run.numbers)
            length += run.length
        return length

    def write_record(self, descriptors: Mapping[int, int]) -> None:
        """Sync the open files, and name what is there. Raises OSError."""
        for descriptor in descriptors.values():
            os.fsync(descriptor)
        ranges = self._ranges()
        self._record = self._record._replace(
            files={
                self._names[file]: PartialFile(
                    os.fstat(descriptor).st_mtime_ns, ranges.get(file, ())
                )
                for file, descriptor in descriptors.items()
            }
        )
        write(self._folder, self._record)

    def _ranges(self) -> dict[int, Sequence[tuple[int, int]]]:
        """Return the ranges that are there, by file: those of neighbours are one."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        before = None
        for number, item in enumerate(self._items):
            if number not in self._present.here:
                before = None
                continue
            # Between two neighbours there are only zeros, as in a hole.
            start = item.start if before is None or before.file != item.file else before.end
            ranges.setdefault(item.file, []).append((start, item.end))
            before = item
        return {file: merged(pairs) for file, pairs in ranges.items()}

    def runs(self, numbers: Sequence[int]) -> Iterator[PullRun]:
        """Gather items to runs; those of the dense part first, since one may be long."""
        gathered: list[int] = []
        for is_blob in (False, True):
            for number in numbers:
                item = self._items[number]
                if (item.key is not None) != is_blob:
                    continue
                if gathered and not self._is_next(gathered, item):
                    yield self._run(gathered)
                    gathered = []
                gathered.append(number)
            if gathered:
                yield self._run(gathered)
                gathered = []

    def _is_next(self, numbers: Sequence[int], item: PackedItem) -> bool:
        first, last = self._items[numbers[0]], self._items[numbers[-1]]
        is_near = last.file == item.file and item.start - last.end <= _MAX_GAP
        return is_near and item.end - first.start <= RUN_LENGTH

    def _run(self, numbers: Sequence[int]) -> PullRun:
        extents = tuple(extent for number in numbers for extent in self._items[number].extents)
        return PullRun(self._items[numbers[0]].file, tuple(numbers), extents)

    def _fetch(self, run: PullRun, descriptor: int, advance: SharedProgress) -> None:
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

    def _pieces(self, file: int, offset: int, length: int) -> Iterator[bytes]:
        path = self._path(file)
        try:
            yield from self._input(file).stream(offset, length)
        except OSError as error:
            raise _cannot_read(error, path, f"byte {offset:,}") from None

    def _path(self, file: int) -> Path:
        return self._pack.file_paths[file]

    def _input(self, file: int) -> InputFile:
        """Return an open file of the pack. Raises PackError for one of another length."""
        with self._opening:
            if file in self._inputs:
                return self._inputs[file]
            path, expected = self._path(file), self._pack.index.files[file].length
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
        path = self._path(extent.input)
        assert extent.digest is not None
        return PackError(
            "the bytes do not have the digest in the index",
            path=path,
            place=f"{extent.label} at byte {extent.offset:,}",
            expected=digest.to_text(extent.digest),
            found=digest.to_text(computed),
            hint=f"the pack there may be damaged: see with `moepack verify {self._pack.path}`",
        )


class _WrongBytesError(Exception):
    """An extent has come with another digest."""

    def __init__(self, extent: Extent, computed: int) -> None:
        super().__init__(extent.label)
        self.extent = extent
        self.computed = computed


def write(folder: Path, record: PartialRecord) -> None:
    """Write .pull.json, whole and synced. Raises OSError."""
    temporary = folder / f"{partial.NAME}.tmp"
    write_synced(temporary, partial.encode(record))
    publish(temporary, folder / partial.NAME)


def _cannot_read(error: OSError, path: Path, place: str | None) -> MachineError:
    problem = f"cannot read: {error.strerror}"
    return MachineError(problem, path=path, place=place, hint=remedy(error))
