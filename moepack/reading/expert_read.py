"""What an engine wants of one expert, as reads: ranges of files, and where they go in its memory.

Pure arithmetic over a pack's index; nothing is opened or read here.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

from moepack import digest
from moepack.errors import MachineError, MoepackError, PackError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moepack.reading.pack import Pack, PartLocation
    from moepack.storage.backend import Completion

PAGE = 4096
"""Ranges of one expert keep their place within a page, so that direct reads need no copy."""

_HINTS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system's table of open files is full",
    errno.EIO: "the drive or its connection fails: see the kernel's log, then run `moepack verify`",
    errno.EINVAL: 'the file system refuses such a direct read: use backend="buffered"',
    errno.ENOMEM: "free memory, or raise the limit of locked memory (ulimit -l)",
}


class Extent(NamedTuple):
    """One read: `length` bytes of the file at `path`, from `offset` on, to `start` in memory."""

    path: Path
    offset: int
    length: int
    start: int


class Wanted(NamedTuple):
    """What is to be read of one expert: a whole blob, or `parts` in the order of the file.

    `length` is the bytes of memory that the extents take.
    """

    layer: int
    expert: int
    family: str | None
    parts: tuple[PartLocation, ...] | None
    extents: tuple[Extent, ...]
    length: int

    def place(self, extent: Extent) -> str:
        """Name an extent of this for a message."""
        inside = [part.part for part in self.parts or () if _holds(extent, part)]
        what = " and ".join(inside) or "blob"
        return f"layer {self.layer} expert {self.expert} {what} at byte {extent.offset}"

    def problem(self, extent: Extent, completion: Completion) -> MoepackError | None:
        """Say what went wrong with the read of `extent`; None where nothing did."""
        error = completion.error
        path, place = extent.path, self.place(extent)
        if isinstance(error, FileNotFoundError):
            return PackError("a data file is missing", path=path, place=place)
        if error is not None:
            hint = _HINTS.get(error.errno or 0)
            return MachineError(f"cannot read: {error.strerror}", path=path, place=place, hint=hint)
        if completion.length < extent.length:
            return PackError(
                "the file ends too early",
                path=path,
                place=place,
                expected=f"{extent.length} bytes",
                found=completion.length,
                hint="it was cut or replaced: run `moepack verify` on the pack",
            )
        return None

    def find(self, part: PartLocation) -> int | None:
        """Say where in memory `part` begins; None where it is not among what was wanted."""
        if self.parts is not None and part not in self.parts:
            return None
        for extent in self.extents:
            if _holds(extent, part):
                return extent.start + part.offset - extent.offset
        return None

    def check_digests(self, pack: Pack, memory: memoryview) -> None:
        """Compare each part in `memory` with its digest; padding is not looked at.

        Raises PackError for the first that differs.
        """
        parts = self.parts
        if parts is None:
            kinds = pack.parts(self.layer, family=self.family)
            names = [kind.name for kind in kinds]
            parts = tuple(
                pack.locate(self.layer, self.expert, name, family=self.family) for name in names
            )
        for part in parts:
            start = self.find(part)
            assert start is not None, "every part lies in an extent"
            found = digest.of(memory[start : start + part.length])
            if found != part.digest:
                raise PackError(
                    "the bytes do not have the digest in the index",
                    path=part.path,
                    place=f"layer {part.layer} expert {part.expert} {part.part} "
                    f"at byte {part.offset}",
                    expected=digest.to_text(part.digest),
                    found=digest.to_text(found),
                    hint="run `moepack verify` on the pack",
                )


def want(
    pack: Pack, layer: int, expert: int, parts: Sequence[str] | None, family: str | None
) -> Wanted:
    """Plan the reads of one expert: its whole blob, or the named `parts`.

    Parts that lie so near each other that padding could be between them are one read. Raises
    RequestError for what the pack does not hold, PackError for a record that breaks the format.
    """
    if parts is None:
        blob = pack.locate(layer, expert, family=family)
        extent = Extent(blob.path, blob.offset, blob.length, 0)
        return Wanted(layer, expert, family, None, (extent,), blob.length)
    if isinstance(parts, str):
        raise RequestError("one name where several go", expected=f"parts=({parts!r},)", found=parts)
    if not parts:
        raise RequestError("no parts were asked for", path=pack.path)
    found = {pack.locate(layer, expert, part, family=family) for part in parts}
    ordered = tuple(sorted(found, key=lambda part: (part.path, part.offset)))
    extents: list[Extent] = []
    for part in ordered:
        if extents and _are_near(extents[-1], part, pack):
            last = extents.pop()
            end = part.offset + part.stored_length
            extents.append(last._replace(length=end - last.offset))
        else:
            extents.append(_next_extent(extents, part))
    length = extents[-1].start + extents[-1].length
    return Wanted(layer, expert, family, ordered, tuple(extents), length)


def _next_extent(before: list[Extent], part: PartLocation) -> Extent:
    start = 0
    if before:
        # As far from the first one as in the file, but for whole pages.
        end = before[-1].start + before[-1].length
        start = end + (part.offset - before[0].offset - end) % PAGE
    return Extent(part.path, part.offset, part.stored_length, start)


def _are_near(extent: Extent, part: PartLocation, pack: Pack) -> bool:
    gap = part.offset - extent.offset - extent.length
    return part.path == extent.path and 0 <= gap < pack.index.header.part_alignment


def _holds(extent: Extent, part: PartLocation) -> bool:
    return extent.path == part.path and 0 <= part.offset - extent.offset < extent.length
