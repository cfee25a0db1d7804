"""The plan of reading one expert: ranges of files, its memory, and where its parts lie there.

Made once, by the catalogue alone, before anything is read. Nothing is opened here.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack.common import digest
from moepack.common.errors import (
    SHORTAGE_HINTS,
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    remedy,
)
from moepack.common.sizes import align
from moepack.pack.reading.locations import PartSpan
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory, writable_bytes
from moepack.storage.regular_file import NotRegularError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from moepack.pack.reading.catalog import Catalog, PartNames
    from moepack.pack.reading.locations import PartLocation, TensorLocation
    from moepack.storage.arena import Arena

PAGE = 4096
"""Ranges keep their offset within a page in memory as well, so that direct reads need no copy."""

_PIECE_LENGTH = 16 << 20
"""The bytes of one read of a dense tensor, which may be larger than one read can be."""

_HINTS = SHORTAGE_HINTS | {
    errno.EIO: "the drive or its connection fails: see the kernel's log, then run `moepack verify`",
    errno.EINVAL: "the file system refuses such a direct read: use `backend=buffered`",
}

CHANGED_HINT = "it was cut, moved or replaced: run `moepack verify` on the pack"
"""The hint where a file lacks bytes that the index has."""

_new_request = partial(tuple.__new__, ReadRequest)


class FileRead(NamedTuple):
    """One read: `length` bytes of the file at `path`, from `offset` on, to `start` in memory."""

    path: Path
    offset: int
    length: int
    start: int

    @property
    def lead(self) -> int:
        """The offset in its first page, in bytes."""
        return self.offset % PAGE


class ReadMemory(NamedTuple):
    """The memory that an expert is read to: `view`, and the whole `pages` around it if all is ours.

    Then reads are rounded outwards to pages, and nothing is copied.
    """

    view: memoryview
    pages: memoryview | None = None

    def part(self, span: PartSpan) -> memoryview:
        """Return the bytes of a part that was read to it."""
        return self.view[span.start : span.start + span.length]


class ScatteredMemory:
    """The buffers that the parts of one expert are read to, by the parts' names.

    Padding between parts goes into memory that nobody looks at. Raises RequestError for buffers
    that are missing, too many or too small.
    """

    __slots__ = ("_buffers", "_read")
    pages = None

    def __init__(self, read: ExpertRead, buffers: Mapping[str, Any]) -> None:
        self._read = read
        by_name = {read.full_name(name): buffer for name, buffer in buffers.items()}
        names = [span.name for span in read.parts]
        if by_name.keys() != set(names) or len(by_name) != len(buffers):
            problem = "scattered reads need one buffer for each part"
            raise RequestError(problem, expected=", ".join(names), found=", ".join(buffers))
        self._buffers = {
            span.name: writable_bytes(by_name[span.name], span.length) for span in read.parts
        }

    @property
    def view(self) -> memoryview:
        """Raises RequestError: no view has all parts."""
        raise RequestError("its parts are in buffers of their own", hint="ask for `part`")

    def part(self, span: PartSpan) -> memoryview:
        """Return the bytes of a part that was read to it."""
        return self._buffers[span.name]

    def pieces(self, file_read: FileRead) -> Iterator[memoryview]:
        """Yield the buffers for one of the reads, in the order of its bytes."""
        start, end = file_read.start, file_read.start + file_read.length
        for span in sorted(self._read.parts, key=lambda span: span.start):
            if span.length and start <= span.start < end:
                if span.start > start:
                    yield _padding(span.start - start)
                yield self._buffers[span.name]
                start = span.start + span.length
        if end > start:
            yield _padding(end - start)


@cache
def _padding(length: int) -> memoryview:
    """Return memory for padding, which all reads share."""
    return map_memory(length)


AnyMemory = ReadMemory | ScatteredMemory


class ExpertRead(NamedTuple):
    """The reads of one expert: of its blob if `is_blob`, else of some of its parts.

    Or those of a dense tensor, which is then the only part; its `layer` is -1.

    `parts` are where the parts are in memory; those of a blob are all of the expert's. `names` are
    all names that parts may be called by. `length` is the bytes of memory that the parts take.
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
        """Its name in messages."""
        return "tensor" if self.layer < 0 else f"layer {self.layer} expert {self.expert}"

    def request(self, file_read: FileRead, memory: AnyMemory) -> ReadRequest:
        """Return the request to a backend for one of the reads to `memory`."""
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

    def received(self, file_read: FileRead, memory: AnyMemory, length: int) -> int:
        """Return the count of a read's own bytes among the `length` bytes of its request."""
        if memory.pages is None or length == len(memory.pages) == file_read.length:
            return length
        return min(max(0, length - file_read.lead), file_read.length)

    def problem(
        self, file_read: FileRead, length: int, error: OSError | None
    ) -> MoepackError | None:
        """Return the error of a read that got `length` bytes of its own; None if it got all."""
        if error is None and length >= file_read.length:
            return None
        path, place = file_read.path, self.place(file_read)
        if error is not None:
            return file_error(path, place, error)
        return short_file(path, place, f"{file_read.length:,} bytes", length)

    def place(self, file_read: FileRead) -> str:
        """Return the place of one of the reads, for messages."""
        names = [part.name for part in self.parts if _holds(file_read, part)]
        what = "blob" if self.is_blob else " and ".join(names) or self.parts[0].name
        return f"{self.owner} {what} at byte {file_read.offset:,}"

    def full_name(self, name: str) -> str:
        """Return the full name of a part that has `name`, maybe short."""
        family, number = self.names.get(name, (None, 0))
        return name if family is None else family.part_kinds[number].name

    def part(self, name: str) -> PartSpan:
        """Return the part `name`. Raises RequestError for one that was not asked for."""
        full_name = self.full_name(name)
        for span in self.parts:
            if span.name == full_name:
                return span
        place = f"{self.owner} {full_name}"
        hint = f"it was read with {', '.join(part.name for part in self.parts)}"
        path = self.file_reads[0].path
        raise RequestError("this part was not requested", path=path, place=place, hint=hint)

    def wrong_digest(self, memory: AnyMemory, parts: Iterable[PartSpan]) -> PackError | None:
        """Compare some of the parts in `memory` with their digests; return the first error."""
        for part in parts:
            if part.digest is None or part.digest == (actual := digest.xxh3(memory.part(part))):
                continue
            reads = [read for read in self.file_reads if _holds(read, part)] or self.file_reads
            offset = reads[0].offset + part.start - reads[0].start
            place = f"{self.owner} {part.name} at byte {offset:,}"
            return digest_error(reads[0].path, place, part.digest, actual)
        return None


def short_file(path: Path, place: str, expected: str, actual: object) -> PackError:
    """Return the error for a file that lacks bytes which the index has."""
    problem, hint = "the file ends too early", CHANGED_HINT
    return PackError(problem, path=path, place=place, expected=expected, found=actual, hint=hint)


def file_error(path: Path, place: str, error: OSError) -> MoepackError:
    """Return the error for a data file that the system does not read."""
    if isinstance(error, FileNotFoundError):
        return PackError("a data file is missing", path=path, place=place, hint=CHANGED_HINT)
    if isinstance(error, NotRegularError):
        return PackError("not a regular file", path=path, place=place, found=error.kind)
    hint = remedy(error) or _HINTS.get(error.errno or 0)
    return MachineError(f"cannot read: {error.strerror}", path=path, place=place, hint=hint)


def digest_error(path: Path, place: str, expected: int, actual: int) -> PackError:
    """Return the error for bytes with another digest than the one in the index."""
    return PackError(
        "the bytes do not have the digest in the index",
        path=path,
        place=place,
        expected=digest.to_text(expected),
        found=digest.to_text(actual),
        hint="run `moepack verify` on the pack",
    )


def _holds(file_read: FileRead, part: PartSpan) -> bool:
    end = file_read.start + file_read.length
    return part.start < end and file_read.start < part.start + part.length


def new_memory(arena: Arena, read: ExpertRead) -> ReadMemory:
    """Return memory in which the reads have the offsets in their pages that they have on disk."""
    if not read.length:  # a tensor may have no bytes
        return ReadMemory(memoryview(bytearray()))
    lead = read.file_reads[0].lead
    try:
        # All pages that the reads touch, one behind the other; as `align`, for every expert.
        pages = arena.allocate((lead + read.length + PAGE - 1) // PAGE * PAGE)
    except MachineError as error:
        first = read.file_reads[0]
        error.path, error.place = str(first.path), read.place(first)
        raise
    view = pages[lead : lead + read.length] if lead or len(pages) > read.length else pages
    return ReadMemory(view, pages)


def callers_memory(buffer: Any, read: ExpertRead) -> AnyMemory:
    """Return the caller's memory: one buffer, or a mapping of several by the names of the parts.

    Raises RequestError for buffers that do not fit.
    """
    is_scattered = isinstance(buffer, Mapping)
    try:
        if is_scattered:
            return ScatteredMemory(read, buffer)
        return ReadMemory(writable_bytes(buffer, read.length))
    except RequestError as error:
        error.place = read.owner if is_scattered else read.place(read.file_reads[0])
        raise


def plan_read(
    catalog: Catalog, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> ExpertRead:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts with no more than padding between them are one read; so are, in an index over shards,
    parts within a page of each other. Raises RequestError for an expert or part that the pack does
    not have, PackError for a record that breaks the format.
    """
    if parts is None:
        blob = catalog.locate_all(layer, expert, family=family)
        if blob is not None:
            path, offset, length, spans = blob
            names = catalog.part_names(layer, family=family)
            file_reads = (FileRead(path, offset, length, 0),)
            return ExpertRead(layer, expert, True, spans, names, file_reads, length)
        parts = [kind.name for kind in catalog.parts(layer, family=family)]
    if not parts:
        raise RequestError("no parts were requested", path=catalog.path)
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
    reads: list[FileRead] = []
    spans = []
    for part in sorted(parts, key=lambda part: (part.path, part.offset)):
        last = reads[-1] if reads else None
        is_near = last is not None and part.path == last.path
        if last and is_near and 0 <= part.offset - last.offset - last.length < gap:
            reads[-1] = last._replace(length=part.offset + part.length - last.offset)
        else:
            start = 0
            if last:  # In pages of its own, and as far behind the start of one as in the file.
                lead = reads[0].lead
                start = align(lead + last.start + last.length, PAGE) - lead + part.offset % PAGE
            reads.append(FileRead(part.path, part.offset, part.length, start))
        start = reads[-1].start + part.offset - reads[-1].offset
        spans.append(PartSpan(part.part, start, part.length, part.digest))
    length = reads[-1].start + reads[-1].length
    return ExpertRead(layer, expert, False, tuple(spans), names, tuple(reads), length)


def plan_tensor(tensor: TensorLocation) -> ExpertRead:
    """Plan the reads of a dense tensor into one range of memory, in pieces in flight together."""
    span = PartSpan(tensor.name, 0, tensor.length, tensor.digest)
    starts = range(0, tensor.length, _PIECE_LENGTH) or range(1)
    reads = tuple(
        FileRead(
            tensor.path, tensor.offset + start, min(_PIECE_LENGTH, tensor.length - start), start
        )
        for start in starts
    )
    return ExpertRead(-1, -1, False, (span,), {}, reads, tensor.length)
