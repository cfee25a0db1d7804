"""What is read of one expert: ranges of files, where they go in its memory, and its parts there.

Planned once, by `read_plan`, before anything is read. Nothing is opened here.
"""

from __future__ import annotations

import errno
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack import digest
from moepack.errors import SHORTAGE_HINTS, MachineError, MoepackError, PackError, RequestError
from moepack.sizes import align
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory, writable_bytes
from moepack.storage.regular_file import NotRegularError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from moepack.reading.catalog import PartNames
    from moepack.reading.locations import PartSpan

PAGE = 4096
"""Ranges of one expert keep their place within a page, so that direct reads need no copy."""

_HINTS = SHORTAGE_HINTS | {
    errno.EIO: "the drive or its connection fails: see the kernel's log, then run `moepack verify`",
    errno.EINVAL: 'the file system refuses such a direct read: use backend="buffered"',
}

_new_request = partial(tuple.__new__, ReadRequest)


class FileRead(NamedTuple):
    """One read: `length` bytes of the file at `path`, from `offset` on, to `start` in memory."""

    path: Path
    offset: int
    length: int
    start: int

    @property
    def lead(self) -> int:
        """How far behind the start of a page it begins, in the file and in memory of ours."""
        return self.offset % PAGE


class Memory(NamedTuple):
    """Where an expert is read to: `view`, and where all of it is ours, the whole `pages` around it.

    Then reads are rounded outwards to pages, and nothing is copied.
    """

    view: memoryview
    pages: memoryview | None = None

    def part(self, span: PartSpan) -> memoryview:
        """Return the bytes of a part that was read to it."""
        return self.view[span.start : span.start + span.length]


class ScatteredMemory:
    """Where the parts of one expert are read to, each into a buffer of its own.

    Padding that lies between parts goes into memory that nobody looks at. Raises RequestError for
    buffers that are missing, too many or too small; `buffers` are by the parts' names.
    """

    __slots__ = ("_buffers", "_read")
    pages = None

    def __init__(self, read: ExpertRead, buffers: Mapping[str, Any]) -> None:
        self._read = read
        given = {read.full_name(name): buffer for name, buffer in buffers.items()}
        missing = [span.name for span in read.parts if span.name not in given]
        if missing or len(given) != len(read.parts) or len(given) != len(buffers):
            expected = ", ".join(span.name for span in read.parts)
            problem = "scattered reads need one buffer for each part"
            raise RequestError(problem, expected=expected, found=", ".join(buffers))
        self._buffers = {
            span.name: writable_bytes(given[span.name], span.length) for span in read.parts
        }

    @property
    def view(self) -> memoryview:
        """Raises RequestError: there is no view of them all."""
        raise RequestError("its parts are in buffers of their own", hint="ask for `part`")

    def part(self, span: PartSpan) -> memoryview:
        """Return the bytes of a part that was read to it."""
        return self._buffers[span.name]

    def pieces(self, file_read: FileRead) -> Iterator[memoryview]:
        """Yield the memory for one of the reads, one piece behind the other."""
        start, end = file_read.start, file_read.start + file_read.length
        for span in sorted(self._read.parts, key=lambda span: span.start):
            if span.length and start <= span.start < end:
                yield from _unseen(span.start - start)
                yield self._buffers[span.name]
                start = span.start + span.length
        yield from _unseen(end - start)


def _unseen(length: int) -> Iterator[memoryview]:
    """Give room for padding; all reads share it."""
    if length:
        yield _padding(align(length, PAGE))[:length]


@cache
def _padding(length: int) -> memoryview:
    return map_memory(length)


class ExpertRead(NamedTuple):
    """What is to be read of one expert: its blob where `is_blob`, else some parts of it.

    `parts` say where the parts are in memory; those of a blob are all of the expert's. `names` are
    what parts may be called. `length` is the bytes of memory that the reads take. `frames` are the
    reads of stored bytes that are decoded into that memory, if any: see `decoded_read`.
    """

    layer: int
    expert: int
    is_blob: bool
    parts: tuple[PartSpan, ...]
    names: PartNames
    file_reads: tuple[FileRead, ...]
    length: int
    frames: ExpertRead | None = None

    @property
    def owner(self) -> str:
        """What a message calls it."""
        return f"layer {self.layer} expert {self.expert}"

    @property
    def lead(self) -> int:
        """How far behind the start of a page it begins in memory of ours."""
        return self.file_reads[0].lead

    @property
    def pages_length(self) -> int:
        """The bytes of all pages that the reads touch, one behind the other."""
        lead = self.file_reads[0].offset % PAGE
        return (lead + self.length + PAGE - 1) // PAGE * PAGE  # as `align`, for every expert read

    def place_in(
        self, file_read: FileRead, memory: Memory | ScatteredMemory, scratch: Memory
    ) -> Memory | ScatteredMemory:
        """Return where one of the reads goes: nothing goes to scratch memory, but for frames."""
        return memory

    def request(self, file_read: FileRead, memory: Memory | ScatteredMemory) -> ReadRequest:
        """Return what a backend is asked for one of the reads."""
        path, offset, length, start = file_read
        if isinstance(memory, ScatteredMemory):
            pieces = tuple(memory.pieces(file_read))
            return ReadRequest(path, offset, pieces[0], pieces[1:])
        view, pages = memory
        if pages is None:
            return ReadRequest(path, offset, view[start : start + length])
        if len(pages) == length:  # a blob that is whole pages
            return _new_request((path, offset, pages, ()))
        lead = offset % PAGE
        first = start + self.lead - lead
        return ReadRequest(path, offset - lead, pages[first : first + align(lead + length, PAGE)])

    def received(self, file_read: FileRead, memory: Memory | ScatteredMemory, got: int) -> int:
        """Return how many of a read's own bytes came, when its request got so many."""
        length = file_read.length
        if memory.pages is None or got == len(memory.pages) == length:
            return got
        return min(max(0, got - file_read.lead), length)

    def problem(self, file_read: FileRead, got: int, error: OSError | None) -> MoepackError | None:
        """Return what went wrong with a read that got so many of its bytes; None for nothing."""
        if error is None and got >= file_read.length:
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
            expected=f"{file_read.length:,} bytes",
            found=got,
            hint="it was cut or replaced: run `moepack verify` on the pack",
        )

    def place(self, file_read: FileRead) -> str:
        """Return what a message calls one of the reads."""
        parts = () if self.is_blob else self.parts
        names = [part.name for part in parts if _holds(file_read, part)]
        what = " and ".join(names) or "blob"
        return f"{self.owner} {what} at byte {file_read.offset:,}"

    def full_name(self, name: str) -> str:
        """Return the name in the pack of what may be called `name`."""
        family, number = self.names.get(name, (None, 0))
        return name if family is None else family.part_kinds[number].name

    def part(self, name: str) -> PartSpan:
        """Return the part `name`. Raises RequestError for one that was not asked for."""
        full_name = self.full_name(name)
        for span in self.parts:
            if span.name == full_name:
                return span
        raise RequestError(
            "this part was not asked for",
            path=self.file_reads[0].path,
            place=f"layer {self.layer} expert {self.expert} {full_name}",
            hint=f"what was read is {', '.join(part.name for part in self.parts)}",
        )

    def check_digests(self, memory: Memory | ScatteredMemory, parts: Iterable[PartSpan]) -> None:
        """Compare some of the parts in `memory` with their digests, where these are known.

        Raises PackError for the first that differs.
        """
        for part in parts:
            expected = part.digest
            if expected is None:
                continue
            actual = digest.of(memory.part(part))
            if actual != expected:
                raise self._damaged(part, expected, actual)

    def place_of(self, part: PartSpan) -> tuple[Path, str]:
        """Return the file of one of the parts, and what a message calls its place there."""
        file_read = next(
            (read for read in self.file_reads if _holds(read, part)), self.file_reads[0]
        )
        offset = file_read.offset + part.start - file_read.start
        return file_read.path, f"{self.owner} {part.name} at byte {offset:,}"

    def _damaged(self, part: PartSpan, expected: int, actual: int) -> PackError:
        path, place = self.place_of(part)
        return PackError(
            "the bytes do not have the digest in the index",
            path=path,
            place=place,
            expected=digest.to_text(expected),
            found=digest.to_text(actual),
            hint="run `moepack verify` on the pack",
        )


def _holds(file_read: FileRead, part: PartSpan) -> bool:
    return 0 <= part.start - file_read.start < file_read.length
