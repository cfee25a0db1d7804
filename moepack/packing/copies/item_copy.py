"""Items of a pack, copied into the files of a folder: each part is checked as it arrives.

Long ranges are asked for, many at a time, and written where they belong as they come, so memory
does not depend on their lengths. What has come is synced, and then may be named in a record.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, remedy
from moepack.pack.reading import copy_record
from moepack.pack.reading.copy_record import CopiedFile, CopyRecord
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import PackedItem, length_of, ranges_of
from moepack.packing.copies.present_items import PresentItems
from moepack.storage.atomic import publish, sync_directory, write_synced
from moepack.storage.extents import Extent
from moepack.storage.input_file import InputFile, open_input
from moepack.storage.regular_file import open_regular, write_at
from moepack.storage.space import check_space
from moepack.storage.thread_pool import SharedProgress, ThreadPool

RUN_LENGTH = 32 << 20
"""About how many bytes are asked for at a time: the hub limits the count of requests."""
_MAX_GAP = 64 << 10
"""Bytes between two items that are asked for and dropped."""
_SYNC_LENGTH = 1 << 30
"""Bytes after which what has come is synced and named."""
_PIECE_LENGTH = 512 << 10
_ATTEMPTS = 3
"""How often bytes are asked for that have the wrong digest."""


class ItemRun(NamedTuple):
    """Items of one file that are asked for at once, by their numbers, and their extents."""

    file: int
    numbers: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def length(self) -> int:
        """The bytes from the first extent to the last."""
        return self.extents[-1].end - self.extents[0].offset


class ItemCopy:
    """A copy in `folder` of the items numbered `missing` of the open `pack`, whose are all `items`.

    Those that are `present` stay; the others are added to them as they come. `length` is the bytes
    to read. Raises MachineError if there is no room for them.
    """

    def __init__(
        self,
        pack: Pack,
        folder: Path,
        items: Sequence[PackedItem],
        present: PresentItems,
        missing: Collection[int],
    ) -> None:
        self._present = present
        self._pack = pack
        self._folder = folder
        self._items = items
        self._inputs: dict[int, InputFile] = {}
        self._opening = threading.Lock()
        self._runs = list(self._gathered(sorted(missing)))
        self.length = sum(run.length for run in self._runs)
        # Wrong bytes are written over.
        all_length = length_of(items, {*present.here, *missing})
        check_space(folder, min(self.length, all_length - present.allocated_length()))

    def fetch(
        self,
        files: Iterable[int],
        threads: int,
        advanced: Callable[[int], None],
        synced: Callable[[Mapping[str, CopiedFile]], None] | None = None,
    ) -> None:
        """Copy the missing items into these `files`, by their numbers, which are made if needed.

        However it ends, `synced` is called with what is there; so it is now and then before.
        Raises PackError for wrong bytes, MachineError if they cannot be read, and OSError.
        """
        shared = SharedProgress(advanced)
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
                        self._fetch_runs(executor, threads, descriptors, shared, sync)
                    except BaseException:
                        shared.stop()
                        raise
            except BaseException:
                with contextlib.suppress(OSError):
                    sync()
                raise
            sync()

    def _open_files(self, files: Iterable[int], stack: ExitStack) -> dict[int, int]:
        """Open files, and make those that are missing; return their descriptors."""
        descriptors = {}
        for number in files:
            file = self._pack.index.files[number]
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
        descriptors: Mapping[int, int],
        advance: SharedProgress,
        sync: Callable[[], None],
    ) -> None:
        in_flight: dict[Future[None], ItemRun] = {}
        unsynced_length = 0
        for run in self._runs:
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
            self._present.here.update(run.numbers)
            self._present.compared.update(run.numbers)
            length += run.length
        return length

    def _present_files(self, descriptors: Mapping[int, int]) -> dict[str, CopiedFile]:
        index = self._pack.index
        ranges = ranges_of(index, self._items, self._present.here)
        names = {number: index.files[number].name for number in descriptors}
        return {
            names[number]: CopiedFile(os.fstat(one).st_mtime_ns, ranges.get(names[number], ()))
            for number, one in descriptors.items()
        }

    def _gathered(self, numbers: Sequence[int]) -> Iterator[ItemRun]:
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

    def _run(self, numbers: Sequence[int]) -> ItemRun:
        extents = tuple(extent for number in numbers for extent in self._items[number].extents)
        return ItemRun(self._items[numbers[0]].file, tuple(numbers), extents)

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
