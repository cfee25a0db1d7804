"""What is read of one expert: ranges of files, where they go in its memory, and its parts there.

Planned once, before anything is read: arithmetic over the catalogue. Nothing is opened here.
"""

from __future__ import annotations

import errno
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack import digest
from moepack.errors import (
    SHORTAGE_HINTS,
    MachineError,
    MoepackError,
    PackError,
    RequestError,
)
from moepack.reading.locations import PartSpan
from moepack.sizes import align
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory, writable_bytes
from moepack.storage.regular_file import NotRegularError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moepack.reading.catalog import Catalog, PartNames
    from moepack.reading.locations import PartLocation, TensorLocation

PAGE = 4096
"""Ranges of one expert keep their place within a page, so that direct reads need no copy."""

_HINTS = SHORTAGE_HINTS | {
    errno.EIO: "the drive or its connection fails: see the kernel's log, then run `moepack verify`",
    errno.EINVAL: 'the file system refuses such a direct read: use backend="buffered"',
}


_PIECE_LENGTH = 16 << 20
"""Of a dense tensor, which may be larger than one read can be."""

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
    what parts may be called. `length` is the bytes of memory that the reads take.
    """

    layer: int
    expert: int
    is_blob: bool
    parts: tuple[PartSpan, ...]
    names: PartNames
    file_reads: tuple[FileRead, ...]
    length: int

    @property
    def owner(self) -> str:
        """What a message calls it."""
        return f"layer {self.layer} expert {self.expert}"

    @property
    def pages_length(self) -> int:
        """The bytes of all pages that the reads touch, one behind the other."""
        lead = self.file_reads[0].offset % PAGE
        return (lead + self.length + PAGE - 1) // PAGE * PAGE  # as `align`, for every expert read

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
        first = start + self.file_reads[0].lead - lead
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

    def _damaged(self, part: PartSpan, expected: int, actual: int) -> PackError:
        file_read = next(
            (read for read in self.file_reads if _holds(read, part)), self.file_reads[0]
        )
        offset = file_read.offset + part.start - file_read.start
        return PackError(
            "the bytes do not have the digest in the index",
            path=file_read.path,
            place=f"{self.owner} {part.name} at byte {offset:,}",
            expected=digest.to_text(expected),
            found=digest.to_text(actual),
            hint="run `moepack verify` on the pack",
        )


def plan_read(
    catalog: Catalog, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> ExpertRead:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts that lie so near each other that padding could be between them are one read; so are, in an
    index over shards, those within a page of each other. Raises
    RequestError for what the pack does not hold, PackError for a record that breaks the format.
    """
    if parts is None:
        blob = catalog.locate_all(layer, expert, family=family)
        if blob is not None:
            path, offset, length, spans = blob
            names = catalog.part_names(layer, family=family)
            file_reads = (FileRead(path, offset, length, 0),)
            return ExpertRead(layer, expert, True, spans, names, file_reads, length)
        parts = [kind.name for kind in catalog.parts(layer, family=family)]
    if isinstance(parts, str):
        raise RequestError("one name where several go", expected=f"parts=({parts!r},)", found=parts)
    if not parts:
        raise RequestError("no parts were asked for", path=catalog.path)
    names = catalog.part_names(layer, family=family)
    locations = {catalog.locate(layer, expert, part, family=family) for part in parts}
    gap = max(catalog.index.header.part_alignment, PAGE)
    return read_of_parts(layer, expert, locations, names, gap)


def read_of_parts(
    layer: int, expert: int, parts: Iterable[PartLocation], names: PartNames, gap: int
) -> ExpertRead:
    """Plan the reads of some parts of an expert, wherever they lie.

    Parts of a file with less than `gap` bytes between them are one read.
    """
    ordered = sorted(parts, key=lambda part: (part.path, part.offset))
    reads: list[FileRead] = []
    spans = []
    for part in ordered:
        if reads and 0 <= _gap(reads[-1], part) < gap:
            last = reads.pop()
            end = part.offset + part.stored_length
            reads.append(last._replace(length=end - last.offset))
        else:
            reads.append(_next_read(reads, part))
        start = reads[-1].start + part.offset - reads[-1].offset
        spans.append(PartSpan(part.part, start, part.length, part.digest))
    length = reads[-1].start + reads[-1].length
    return ExpertRead(layer, expert, False, tuple(spans), names, tuple(reads), length)


def _next_read(before: list[FileRead], part: PartLocation) -> FileRead:
    if not before:
        return FileRead(part.path, part.offset, part.stored_length, 0)
    # In pages of its own, and as far behind the start of one as in the file.
    lead = before[0].lead
    end = align(lead + before[-1].start + before[-1].length, PAGE)
    return FileRead(part.path, part.offset, part.stored_length, end - lead + part.offset % PAGE)


def _gap(file_read: FileRead, part: PartLocation) -> int:
    """Count the bytes between a read and a part behind it; -1 for one in another file."""
    if part.path != file_read.path:
        return -1
    return part.offset - file_read.offset - file_read.length


def _holds(file_read: FileRead, part: PartSpan) -> bool:
    return 0 <= part.start - file_read.start < file_read.length


class TensorRead(ExpertRead):
    """What is to be read of one dense tensor, in pieces that can be in flight together."""

    __slots__ = ()

    @property
    def owner(self) -> str:
        """What a message calls it."""
        return "tensor"

    def place(self, file_read: FileRead) -> str:
        """Return what a message calls one of the reads."""
        return f"tensor {self.parts[0].name} at byte {file_read.offset:,}"


def plan_tensor(tensor: TensorLocation) -> TensorRead:
    """Plan the reads of a dense tensor into one range of memory."""
    span = PartSpan(tensor.name, 0, tensor.length, tensor.digest)
    starts = range(0, tensor.length, _PIECE_LENGTH) or range(1)
    reads = tuple(
        FileRead(
            tensor.path, tensor.offset + start, min(_PIECE_LENGTH, tensor.length - start), start
        )
        for start in starts
    )
    return TensorRead(-1, -1, False, (span,), {}, reads, tensor.length)
