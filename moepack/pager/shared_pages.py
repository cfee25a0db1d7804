"""Pages of an image that are not one part's alone: the edges of parts that begin on no page."""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moepack.errors import MachineError, PackError, read_failure
from moepack.keys import ExpertKey
from moepack.pager.mapped_model import Families, PartSpan
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader

_PAGE = mmap.PAGESIZE


class PlacedPart(NamedTuple):
    """A part of an expert of a family, and where it lies in the image."""

    family: str
    key: ExpertKey
    span: PartSpan


class SharedPages:
    """Puts pages together from the parts that have bytes on them, and keeps them.

    Bytes of a neighbour are read without its digest being checked. When the neighbour itself is
    brought, and was checked, `compare` holds the page against it. Who reads a page that nobody
    announced gets it from whole parts, which the reader checks.
    """

    def __init__(self, pack: Pack, reader: Reader, places: Families) -> None:
        self._pack, self._reader = pack, reader
        self._parts = sorted(
            (
                PlacedPart(family, key, span)
                for family, experts in places.items()
                for key, spans in experts.items()
                for span in spans
            ),
            key=lambda part: part.span.offset,
        )
        self._starts = [part.span.offset for part in self._parts]
        self._pages: dict[int, bytes] = {}
        self._checked: set[int] = set()

    def on_page(self, page: int) -> list[PlacedPart]:
        """Return the parts that have bytes on the page which begins at `page` of the image."""
        first = max(0, bisect.bisect_right(self._starts, page) - 1)
        last = bisect.bisect_left(self._starts, page + _PAGE)
        return [
            part for part in self._parts[first:last] if part.span.offset + part.span.length > page
        ]

    def edges(self, spans: Iterable[PartSpan]) -> Iterator[tuple[PartSpan, int]]:
        """Yield the pages that parts share with others, or with what is behind a tensor."""
        for span in spans:
            start, end = span.whole_pages
            pages = range(span.first_page, span.first_page + span.room, _PAGE)
            yield from ((span, page) for page in pages if not start <= page < end)

    def page(self, page: int) -> bytes:
        """Return the bytes of a page. Raises what reading raises."""
        if page not in self._pages:
            self._pages[page] = self._put_together(page, self._read)
        return self._pages[page]

    def checked_page(self, page: int) -> bytes:
        """Return the bytes of a page, as of parts that were checked. Raises what reading raises."""
        if page not in self._checked:
            self._pages[page] = self._put_together(page, self._read_whole)
            self._checked.add(page)
        return self._pages[page]

    def _put_together(self, page: int, read: Callable[[PlacedPart, int, int], bytes]) -> bytes:
        content = bytearray(_PAGE)
        for part in self.on_page(page):
            start = max(part.span.offset, page)
            end = min(part.span.offset + part.span.length, page + _PAGE)
            content[start - page : end - page] = read(part, start - part.span.offset, end - start)
        return bytes(content)

    def compare(self, span: PartSpan, page: int, part: memoryview, place: str) -> None:
        """Hold a page against a part that was checked. Raises PackError where they differ."""
        start = max(span.offset, page)
        end = min(span.offset + span.length, page + _PAGE)
        expected = part[start - span.offset : end - span.offset]
        if self.page(page)[start - page : end - page] != expected:
            problem = "the same bytes were read twice, and differ"
            raise PackError(problem, path=self._pack.path, place=f"{place} {span.part}")

    def _read(self, part: PlacedPart, start: int, length: int) -> bytes:
        location = self._pack.locate(*part.key, part.span.part, family=part.family)
        if location.codec:
            return self._read_whole(part, start, length)
        try:
            descriptor = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise read_failure(error, location.path, PackError) from error
        try:
            piece = os.pread(descriptor, length, location.offset + start)
        except OSError as error:
            raise read_failure(error, location.path, PackError) from error
        finally:
            os.close(descriptor)
        if len(piece) < length:
            raise MachineError("the file has become shorter", path=location.path)
        return piece

    def _read_whole(self, part: PlacedPart, start: int, length: int) -> bytes:
        (expert,) = self._reader.read_many([part.key], parts=[part.span.part], family=part.family)
        return bytes(expert.view[start : start + length])
