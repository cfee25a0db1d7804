"""Pages of an image that are not one part's alone: the edges of parts that begin on no page."""

import bisect
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moepack.common.errors import MachineError, PackError, read_failure
from moepack.common.paths import is_remote
from moepack.common.shape import ExpertKey
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.running.pager.mapped_model import FamilySpans, MappedSpan
from moepack.storage.regular_file import open_regular, read_whole

_PAGE = mmap.PAGESIZE


class MappedPart(NamedTuple):
    """A part of an expert of a family, and its span of the image."""

    family: str
    key: ExpertKey
    span: MappedSpan


class SharedPages:
    """Puts pages together from the parts that have bytes on them, and keeps them.

    A neighbour's bytes are read without checking its digest. When the neighbour itself is read
    and checked, `compare` checks the page against it. A thread that reads an unannounced page gets
    it from whole parts, which the reader checks.
    """

    def __init__(self, pack: Pack, reader: Reader, families: FamilySpans) -> None:
        self._pack, self._reader = pack, reader
        self._parts = sorted(
            (
                MappedPart(family, key, span)
                for family, experts in families.items()
                for key, spans in experts.items()
                for span in spans
            ),
            key=lambda part: part.span.offset,
        )
        self._starts = [part.span.offset for part in self._parts]
        self._pages: dict[int, bytes] = {}
        self._checked: set[int] = set()

    def parts_on(self, page: int) -> list[MappedPart]:
        """Return the parts that have bytes on the page at offset `page` of the image."""
        first = max(0, bisect.bisect_right(self._starts, page) - 1)
        last = bisect.bisect_left(self._starts, page + _PAGE)
        return [
            part for part in self._parts[first:last] if part.span.offset + part.span.length > page
        ]

    def edges(self, spans: Iterable[MappedSpan]) -> Iterator[tuple[MappedSpan, int]]:
        """Yield the pages that parts share with others, or with bytes behind a tensor."""
        for span in spans:
            start, end = span.whole_pages
            pages = range(span.first_page, span.first_page + span.paged_length, _PAGE)
            yield from ((span, page) for page in pages if not start <= page < end)

    def page(self, page: int) -> bytes:
        """Return the bytes of a page. Raises the errors of reading."""
        if page not in self._pages:
            self._pages[page] = self._assemble(page, self._read)
        return self._pages[page]

    def checked_page(self, page: int) -> bytes:
        """Return the bytes of a page, of checked parts. Raises the errors of reading."""
        if page not in self._checked:
            self._pages[page] = self._assemble(page, self._read_whole)
            self._checked.add(page)
        return self._pages[page]

    def _assemble(self, page: int, read: Callable[[MappedPart, int, int], bytes]) -> bytes:
        content = bytearray(_PAGE)
        for part in self.parts_on(page):
            start = max(part.span.offset, page)
            end = min(part.span.offset + part.span.length, page + _PAGE)
            content[start - page : end - page] = read(part, start - part.span.offset, end - start)
        return bytes(content)

    def compare(self, span: MappedSpan, page: int, part: memoryview, place: str) -> None:
        """Check a page against a part that was checked. Raises PackError if they differ."""
        start = max(span.offset, page)
        end = min(span.offset + span.length, page + _PAGE)
        expected = part[start - span.offset : end - span.offset]
        if self.page(page)[start - page : end - page] != expected:
            problem = "the same bytes were read twice, and differ"
            raise PackError(problem, path=self._pack.path, place=f"{place} {span.part}")

    def _read(self, part: MappedPart, start: int, length: int) -> bytes:
        location = self._pack.locate(*part.key, part.span.part, family=part.family)
        if is_remote(location.path):  # in a part of a pack
            return self._read_whole(part, start, length)
        try:
            with open(location.path, "rb", buffering=0, opener=open_regular) as file:
                return bytes(read_whole(file.fileno(), location.offset + start, length))
        except OSError as error:
            raise read_failure(error, location.path, PackError) from error
        except EOFError:
            raise MachineError("the file has become shorter", path=location.path) from None

    def _read_whole(self, part: MappedPart, start: int, length: int) -> bytes:
        (expert,) = self._reader.read_many([part.key], parts=[part.span.part], family=part.family)
        return bytes(expert.view[start : start + length])
