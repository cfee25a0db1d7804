"""What is read of one expert: ranges of files, where they go in its memory, and its parts there.

Planned once, before anything is read: arithmetic over the catalogue. Nothing is opened here.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

from moepack import digest
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.storage.regular_file import MACHINE_HINTS, NotRegularError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moepack.reading.catalog import Catalog, PartLocation, PartNames
    from moepack.storage.backend import Completion

PAGE = 4096
"""Ranges of one expert keep their place within a page, so that direct reads need no copy."""

_HINTS = MACHINE_HINTS | {
    errno.EIO: "the drive or its connection fails: see the kernel's log, then run `moepack verify`",
    errno.EINVAL: 'the file system refuses such a direct read: use backend="buffered"',
}


class FileRead(NamedTuple):
    """One read: `length` bytes of the file at `path`, from `offset` on, to `start` in memory."""

    path: Path
    offset: int
    length: int
    start: int


class ExpertRead(NamedTuple):
    """What is to be read of one expert: its blob where `is_blob`, else some parts of it.

    `parts` lie in `file_reads`; those of a blob are all of the expert's. `names` are what parts may
    be called. `length` is the bytes of memory that the reads take.
    """

    layer: int
    expert: int
    is_blob: bool
    parts: tuple[PartLocation, ...]
    names: PartNames
    file_reads: tuple[FileRead, ...]
    length: int

    def place(self, file_read: FileRead) -> str:
        """Return what a message calls one of the reads."""
        parts = () if self.is_blob else self.parts
        names = [part.part for part in parts if _holds(file_read, part)]
        what = " and ".join(names) or "blob"
        return f"layer {self.layer} expert {self.expert} {what} at byte {file_read.offset}"

    def problem(self, file_read: FileRead, completion: Completion) -> MoepackError | None:
        """Return what went wrong with one of the reads; None where nothing did."""
        error = completion.error
        if error is None and completion.length >= file_read.length:
            return None
        path, place = file_read.path, self.place(file_read)
        if isinstance(error, FileNotFoundError):
            return PackError("a data file is missing", path=path, place=place)
        if isinstance(error, NotRegularError):
            return PackError("not a regular file", path=path, place=place, found=error.kind)
        if error is not None:
            hint = _HINTS.get(error.errno or 0)
            return MachineError(f"cannot read: {error.strerror}", path=path, place=place, hint=hint)
        return PackError(
            "the file ends too early",
            path=path,
            place=place,
            expected=f"{file_read.length} bytes",
            found=completion.length,
            hint="it was cut or replaced: run `moepack verify` on the pack",
        )

    def view(self, memory: memoryview, name: str) -> memoryview:
        """Return the bytes of the part `name` in `memory`, without padding.

        Raises RequestError for a part that was not asked for.
        """
        family, number = self.names.get(name, (None, 0))
        full_name = name if family is None else family.part_kinds[number].name
        for part in self.parts:
            if part.part == full_name:
                return self._view(memory, part)
        raise RequestError(
            "this part was not asked for",
            path=self.file_reads[0].path,
            place=f"layer {self.layer} expert {self.expert} {full_name}",
            hint=f"what was read is {', '.join(part.part for part in self.parts)}",
        )

    def check_digests(self, memory: memoryview) -> None:
        """Compare each part in `memory` with its digest; padding is not looked at.

        Raises PackError for the first that differs.
        """
        for part in self.parts:
            actual = digest.of(self._view(memory, part))
            if actual != part.digest:
                raise PackError(
                    "the bytes do not have the digest in the index",
                    path=part.path,
                    place=f"layer {part.layer} expert {part.expert} {part.part} "
                    f"at byte {part.offset}",
                    expected=digest.to_text(part.digest),
                    found=digest.to_text(actual),
                    hint="run `moepack verify` on the pack",
                )

    def _view(self, memory: memoryview, part: PartLocation) -> memoryview:
        start = part.offset_in_blob
        if not self.is_blob:
            file_read = next(read for read in self.file_reads if _holds(read, part))
            start = file_read.start + part.offset - file_read.offset
        return memory[start : start + part.length]


def plan_read(
    catalog: Catalog, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> ExpertRead:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts that lie so near each other that padding could be between them are one read. Raises
    RequestError for what the pack does not hold, PackError for a record that breaks the format.
    """
    if parts is None:
        path, offset, length, all_parts = catalog.locate_all(layer, expert, family=family)
        file_reads = (FileRead(path, offset, length, 0),)
        names = catalog.part_names(layer, family=family)
        return ExpertRead(layer, expert, True, all_parts, names, file_reads, length)
    if isinstance(parts, str):
        raise RequestError("one name where several go", expected=f"parts=({parts!r},)", found=parts)
    if not parts:
        raise RequestError("no parts were asked for", path=catalog.path)
    locations = {catalog.locate(layer, expert, part, family=family) for part in parts}
    ordered = tuple(sorted(locations, key=lambda part: (part.path, part.offset)))
    ranges: list[FileRead] = []
    for part in ordered:
        if ranges and _are_near(ranges[-1], part, catalog):
            last = ranges.pop()
            end = part.offset + part.stored_length
            ranges.append(last._replace(length=end - last.offset))
        else:
            ranges.append(_next_read(ranges, part))
    length = ranges[-1].start + ranges[-1].length
    names = catalog.part_names(layer, family=family)
    return ExpertRead(layer, expert, False, ordered, names, tuple(ranges), length)


def _next_read(before: list[FileRead], part: PartLocation) -> FileRead:
    start = 0
    if before:
        # As far from the first one as in the file, but for whole pages.
        end = before[-1].start + before[-1].length
        start = end + (part.offset - before[0].offset - end) % PAGE
    return FileRead(part.path, part.offset, part.stored_length, start)


def _are_near(file_read: FileRead, part: PartLocation, catalog: Catalog) -> bool:
    gap = part.offset - file_read.offset - file_read.length
    return part.path == file_read.path and 0 <= gap < catalog.index.header.part_alignment


def _holds(file_read: FileRead, part: PartLocation) -> bool:
    return file_read.path == part.path and 0 <= part.offset - file_read.offset < file_read.length
