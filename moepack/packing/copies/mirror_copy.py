"""The files of a mirror: ranges of the pack's files, copied and read back until they are right."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import MachineError, MoepackError, PackError
from moepack.common.phases import Progress, advancing
from moepack.common.sizes import gaps
from moepack.pack.reading.catalog import Catalog
from moepack.pack.reading.expert_read import FileRead
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.read_plan import plan_read
from moepack.pack.reading.reader import Reader
from moepack.storage import holes
from moepack.storage.atomic import sync_directory
from moepack.storage.inputs import Inputs
from moepack.storage.page_cache import drop
from moepack.storage.regular_file import open_regular, write_at

_GROUP_LENGTH = 256 << 20
"""Bytes that are copied before they are read back."""
_PIECE_LENGTH = 8 << 20


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

    `ranges` are those of the files to copy, by the files' names, and `length` their bytes;
    `file_lengths` are those of all files of the pack. `compared_length` is the bytes of the experts
    that were read from the copy and had their digests. Raises PackError if parts have no digests:
    nobody could tell a copy that is out of date.
    """

    def __init__(self, pack: Pack, folder: Path, hottest: int | None) -> None:
        self.experts = expert_reads(pack, hottest)
        self.content = pack.index.content_digest()
        paths = {read.path for expert in self.experts for read in expert.file_reads}
        for file, path in zip(pack.index.files, pack.file_paths, strict=False):
            if path in paths and not file.has_digests:
                hint = "make the index anew, with digests: `moepack index --digests`"
                raise PackError("has no digests to check a mirror by", path=pack.path, hint=hint)
        ranges = _merge(read for expert in self.experts for read in expert.file_reads)
        self.ranges = dict(sorted(ranges.items()))
        self.length = sum(end - start for of_file in ranges.values() for start, end in of_file)
        self.compared_length = 0
        self._pack = pack
        self._folder = folder
        self._sources = sorted(paths)
        self.file_lengths = {file.name: file.length for file in pack.index.files}
        # The pack as it would be if its files were those of the mirror.
        file_paths = [folder / path.name for path in pack.file_paths]
        self._catalog = Catalog(folder, pack.index, file_paths)

    def length_on_disk(self) -> int:
        """Return the bytes that the files in the folder take there now."""
        length = 0
        for name in self.ranges:
            with contextlib.suppress(FileNotFoundError):
                length += os.stat(self._folder / name).st_blocks * 512
        return length

    def run(self, progress: Progress | None) -> int:
        """Copy all experts that are missing or wrong; return the bytes of the right ones.

        Raises PackError for experts that are damaged in the pack, MachineError for a drive that
        does not give back the written bytes, and OSError.
        """
        is_new = not self.length_on_disk()
        advanced = advancing(progress, sum(expert.length for expert in self.experts))
        kept_length = 0
        with ExitStack() as stack:
            descriptors = {}
            for name in self.ranges:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                descriptors[name] = open_regular(self._folder / name, flags)
                stack.callback(os.close, descriptors[name])
                self._shape(name, descriptors[name])
            sync_directory(self._folder)
            inputs = stack.enter_context(Inputs(self._sources, PackError))
            reader = stack.enter_context(Reader(self._catalog))
            for group in _groups(self.experts):
                missing = group if is_new else [one for one, _ in self._wrong(reader, group)]
                length = sum(one.length for one in group)
                kept_length += length - sum(one.length for one in missing)
                self._copy(missing, inputs, descriptors)
                for expert, error in self._wrong(reader, missing):
                    self._blame(expert, error)
                advanced(length)
        return kept_length

    def _shape(self, name: str, descriptor: int) -> None:
        """Give a file its length, and back to the drive all bytes outside the ranges."""
        length = self.file_lengths[name]
        if os.fstat(descriptor).st_size != length:
            os.ftruncate(descriptor, length)
        if os.fstat(descriptor).st_blocks:
            with contextlib.suppress(OSError):  # they take room, and nobody reads them
                for start, end in gaps(0, length, self.ranges[name]):
                    holes.punch(descriptor, start, end - start)
        os.fsync(descriptor)

    def _wrong(
        self, reader: Reader, experts: Sequence[MirroredExpert]
    ) -> list[tuple[MirroredExpert, MoepackError]]:
        """Read experts from the mirror; return the wrong ones, with their errors."""
        reads = [
            plan_read(self._catalog, one.layer, one.expert, None, one.family) for one in experts
        ]
        wrong: list[tuple[MirroredExpert, MoepackError]] = []
        done = 0
        with reader.submit_reads(reads) as batch:
            while done < len(reads):
                try:
                    for _ in batch.completions(in_order=True):
                        self.compared_length += experts[done].length
                        done += 1
                except (PackError, MachineError) as error:
                    wrong.append((experts[done], error.with_traceback(None)))
                    done += 1
        return wrong

    def _copy(
        self, experts: Iterable[MirroredExpert], inputs: Inputs, descriptors: dict[str, int]
    ) -> None:
        """Copy experts from the pack, and sync them."""
        numbers = {path.name: number for number, path in enumerate(self._sources)}
        for name, ranges in _merge(r for one in experts for r in one.file_reads).items():
            for start, end in ranges:
                for offset in range(start, end, _PIECE_LENGTH):
                    data = inputs.read(numbers[name], offset, min(_PIECE_LENGTH, end - offset))
                    write_at(descriptors[name], data, offset)
            drop([self._folder / name])  # which syncs it first: what is read back is on the drive

    def _blame(self, expert: MirroredExpert, error: MoepackError) -> None:
        """Raise the error of the pack, if the expert is not right there either, or of the drive."""
        with self._pack.reader(mirror=False) as reader:
            reader.read(expert.layer, expert.expert, family=expert.family)
        problem = "the drive returned other bytes than were written"
        hint = "the drive or the memory is failing: the pack is as it was"
        raise MachineError(problem, path=error.path, place=error.place, hint=hint)


def _merge(reads: Iterable[FileRead]) -> dict[str, list[tuple[int, int]]]:
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
