"""The files of a mirror: ranges of the pack's files, copied and read back until they are right."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError, PackError, read_failure
from moepack.reading.catalog import Catalog
from moepack.reading.expert_read import FileRead
from moepack.reading.mirror import Description, Ranges
from moepack.reading.pack import Pack
from moepack.reading.read_plan import plan_read
from moepack.reading.reader import Reader
from moepack.sizes import gaps
from moepack.storage import holes
from moepack.storage.atomic import sync_directory
from moepack.storage.buffers import allocate
from moepack.storage.page_cache import drop
from moepack.storage.regular_file import open_regular

_GROUP_LENGTH = 256 << 20
"""Bytes that are copied before they are read back."""
_PIECE_LENGTH = 8 << 20

Progress = Callable[[int, int], None]


class MirroredExpert(NamedTuple):
    """An expert: its reads in the pack, and their bytes."""

    layer: int
    expert: int
    family: str
    file_reads: tuple[FileRead, ...]

    @property
    def length(self) -> int:
        """The bytes of its reads."""
        return sum(read.length for read in self.file_reads)


def expert_reads(pack: Pack, hottest: int | None) -> list[MirroredExpert]:
    """List all experts, or the hottest up to so many bytes, in the order of the files."""
    if hottest is None:
        keys = [
            (family.layer, expert, family.name)
            for family in pack.index.families
            for expert in range(family.expert_count)
        ]
    else:
        keys = [(*key, pack.families(key.layer)[0]) for key in pack.hottest(hottest)]
    experts = [
        MirroredExpert(*key, plan_read(pack, key[0], key[1], None, key[2]).file_reads)
        for key in keys
    ]
    return sorted(experts, key=lambda expert: expert.file_reads[0])


class MirrorCopy:
    """The copy of a pack's experts in `folder`.

    `ranges` are those of the files that are wanted, by the files' names, and `length` their bytes.
    Raises PackError where parts have no digests: nobody could tell a copy that is out of date.
    """

    def __init__(self, pack: Pack, folder: Path, hottest: int | None) -> None:
        self.experts = expert_reads(pack, hottest)
        self.content = pack.index.content_digest()
        paths = {read.path for expert in self.experts for read in expert.file_reads}
        for file, path in zip(pack.index.files, pack.file_paths, strict=False):
            if path in paths and not file.has_digests:
                hint = "make the index anew, with digests: `moepack index --digests`"
                raise PackError("has no digests to check a mirror by", path=pack.path, hint=hint)
        self.ranges = _merged(read for expert in self.experts for read in expert.file_reads)
        self.length = sum(end - start for of in self.ranges.values() for start, end in of)
        self._pack = pack
        self._folder = folder
        self._sources = {path.name: path for path in paths}
        self._lengths = {file.name: file.length for file in pack.index.files}
        # The pack as it would be if its files were those of the mirror.
        self._catalog = Catalog(
            folder, pack.index, [folder / path.name for path in pack.file_paths]
        )

    @property
    def file_names(self) -> set[str]:
        """The names of all files of the pack."""
        return set(self._lengths)

    def description(self, pack: str, hottest: int | None, *, is_empty: bool = False) -> Description:
        """Return what mirror.json says when all is there, or while nothing is to be looked at."""
        ranges = {name: () if is_empty else of for name, of in sorted(self.ranges.items())}
        return Description(self.content, pack, hottest, ranges)

    def length_on_disk(self) -> int:
        """Return the bytes that the files in the folder take there now."""
        length = 0
        for name in self.ranges:
            with contextlib.suppress(FileNotFoundError):
                length += os.stat(self._folder / name).st_blocks * 512
        return length

    def run(self, progress: Progress | None) -> int:
        """Copy what is not there or not right; return the bytes that were.

        Raises PackError for experts that are damaged in the pack, MachineError for a drive that
        does not give back what was written, and OSError.
        """
        is_new = not self.length_on_disk()
        total = sum(expert.length for expert in self.experts)
        kept_length = 0
        with ExitStack() as stack:
            files = {name: _Target(self._folder / name) for name in self.ranges}
            for name, file in files.items():
                stack.callback(file.close)
                file.shape(self._lengths[name], self.ranges[name])
            sync_directory(self._folder)
            reader = stack.enter_context(Reader(self._catalog))
            for group in _groups(self.experts):
                missing = group if is_new else [one for one, _ in self._wrong(reader, group)]
                kept_length += sum(one.length for one in group) - sum(one.length for one in missing)
                self._copy(missing, files)
                for expert, error in self._wrong(reader, missing):
                    self._blame(expert, error)
                if progress is not None:
                    progress(sum(one.length for one in group), total)
        return kept_length

    def _wrong(
        self, reader: Reader, experts: Sequence[MirroredExpert]
    ) -> list[tuple[MirroredExpert, MoepackError]]:
        """Read experts from the mirror; return those that are not right there, and why."""
        reads = [
            plan_read(self._catalog, one.layer, one.expert, None, one.family) for one in experts
        ]
        wrong: list[tuple[MirroredExpert, MoepackError]] = []
        done = 0
        with reader.submit_reads(reads) as batch:
            while done < len(reads):
                try:
                    for _ in batch.completions(in_order=True):
                        done += 1
                except (PackError, MachineError) as error:
                    wrong.append((experts[done], error.with_traceback(None)))
                    done += 1
        return wrong

    def _copy(self, experts: Iterable[MirroredExpert], files: dict[str, _Target]) -> None:
        """Copy experts from the pack, and sync them."""
        for name, ranges in _merged(r for one in experts for r in one.file_reads).items():
            with _Source(self._sources[name]) as source:
                for start, end in ranges:
                    for offset in range(start, end, _PIECE_LENGTH):
                        files[name].write(
                            source.read(offset, min(_PIECE_LENGTH, end - offset)), offset
                        )
            drop([self._folder / name])  # which syncs it first: what is read back is on the drive

    def _blame(self, expert: MirroredExpert, error: MoepackError) -> None:
        """Raise the error of the pack, if the expert is not right there either, or of the drive."""
        with self._pack.reader(mirror=False) as reader:
            reader.read(expert.layer, expert.expert, family=expert.family)
        problem = "what is read back from the drive is not what was written"
        hint = "the drive or the memory is failing: the pack is as it was"
        raise MachineError(problem, path=error.path, place=error.place, hint=hint)


class _Target:
    """A file of the mirror, open for writing."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)

    def shape(self, length: int, ranges: Ranges) -> None:
        """Give the file its length, and back to the drive what is in no range."""
        descriptor = self._descriptor
        if os.fstat(descriptor).st_size != length:
            os.ftruncate(descriptor, length)
        if os.fstat(descriptor).st_blocks:
            with contextlib.suppress(OSError):  # they take room, and nobody reads them
                for start, end in gaps(0, length, ranges):
                    holes.punch(descriptor, start, end - start)
        os.fsync(descriptor)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`."""
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class _Source:
    """A file of the pack, read piece by piece into the same memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = allocate(_PIECE_LENGTH)

    def __enter__(self) -> _Source:
        try:
            self._descriptor = open_regular(self._path)
        except OSError as error:
            raise read_failure(error, self._path, PackError) from None
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes, until the next call. Raises PackError where there are fewer."""
        done = 0
        while done < length:
            try:
                got = os.preadv(self._descriptor, [self._memory[done:length]], offset + done)
            except OSError as error:
                place = f"byte {offset:,}"
                raise read_failure(error, self._path, MachineError, place) from None
            if not got:
                place = f"byte {offset + done:,}"
                raise PackError("the file ends too early", path=self._path, place=place)
            done += got
        return self._memory[:length]


def _merged(reads: Iterable[FileRead]) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of reads by the name of their file, ascending and apart."""
    by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for read in sorted(reads):
        ranges, end = by_name[read.path.name], read.offset + read.length
        if ranges and read.offset <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((read.offset, end))
    return by_name


def _groups(experts: Sequence[MirroredExpert]) -> Iterator[list[MirroredExpert]]:
    """Yield experts in groups of about as many bytes as are copied at a time."""
    group: list[MirroredExpert] = []
    length = 0
    for expert in experts:
        group.append(expert)
        length += expert.length
        if length >= _GROUP_LENGTH:
            yield group
            group, length = [], 0
    if group:
        yield group
