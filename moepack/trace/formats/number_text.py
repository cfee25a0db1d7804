"""Text with many numbers, looked at as arrays: no line of it is ever a Python string.

A text file is cut into pieces of whole lines. Of each piece it is found where every run of digits
begins and ends; a format is then recognised by what stands between them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.model import Bytes, Ints

PIECE_LENGTH = 1 << 19
"""So much that numpy's calls are few, and so little that a processor's cache holds it."""
MAX_LINE_LENGTH = 16 << 20
MAX_DIGITS = 19
"""Of a number below 2^63."""
_SMALL_DIGITS = 9
_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, with which some programs begin a file."""
_FRONT = b"\0" * 31 + b"\n"
_BACK = b"\0" * 96
MAX_LOOK = 80
"""So many bytes can be looked at from any place in a text on."""
BEFORE = len(_FRONT)
"""Where the first line begins in `Text.data`; so many bytes can be looked at before a number."""

Places = NDArray[np.intp]
Words = NDArray[np.uint64]
Truths = NDArray[np.bool_]


class Text:
    """Some whole lines, as bytes, and where the numbers in them are.

    `data` begins with a newline and ends with one (and zeros beyond both, so that looking there is
    safe); there are no other line ends, and no blanks around lines. Number n is the run of digits
    `data[starts[n]:ends[n]]`. `first_line` is the number, from 1, of the first line in the file;
    who takes texts in order sets it. `is_cut` says that the file ended without a newline.
    """

    def __init__(self, lines: bytes, is_cut: bool = False) -> None:
        self.data = b"".join((_FRONT, lines, bytes(-len(lines) % 8), _BACK))
        self.first_line = 1
        self.is_cut = is_cut
        self.bytes: Bytes = np.frombuffer(self.data, np.uint8)
        self._words: Words = np.frombuffer(self.data, "<u8")

    @cached_property
    def _edges(self) -> Places:
        is_digit = (self.bytes - np.uint8(48)) < 10
        edges: Places = np.flatnonzero(is_digit[1:] != is_digit[:-1])
        edges += 1
        return edges

    @cached_property
    def starts(self) -> Places:
        """Where numbers begin."""
        return np.ascontiguousarray(self._edges[0::2])

    @cached_property
    def ends(self) -> Places:
        """Where they end."""
        return np.ascontiguousarray(self._edges[1::2])

    @cached_property
    def line_ends(self) -> Places:
        """Where the newlines are, that before the first line included."""
        return np.flatnonzero(self.bytes == 10)

    @property
    def line_count(self) -> int:
        """How many lines there are."""
        return len(self.line_ends) - 1

    def words(self, places: Places) -> Words:
        """Return the eight bytes at each of `places` as a little-endian number.

        From two aligned words each, since numpy is slow with misaligned ones.
        """
        number = places >> 3
        shift = ((places & 7) << 3).astype(np.uint64)
        words: Words = self._words.take(number)
        words >>= shift
        number += 1
        above = self._words.take(number)
        above <<= np.uint64(1)
        above <<= np.uint64(63) - shift
        words |= above
        return words

    def has(self, places: Places, text: bytes) -> Truths:
        """Say for each of `places` whether `text` stands there."""
        assert len(text) <= MAX_LOOK, "there are zeros behind a text, but not for ever"
        if len(text) == 1:
            is_there: Truths = self.bytes.take(places) == text[0]
            return is_there
        right: Truths | None = None
        for at in range(0, len(text), 8):
            part = text[at : at + 8]
            words = self.words(places + at if at else places)
            if len(part) < 8:
                words &= np.uint64((1 << 8 * len(part)) - 1)
            here = words == word(part)
            right = here if right is None else right & here
        assert right is not None, "some text to look for"
        return right

    def values(self, numbers: Places) -> Ints:
        """Return the values of some numbers; those from 2^63 on are negative."""
        at = self.ends.take(numbers)
        at -= 1
        values: Ints = self._digits(at).astype(np.int32)  # half the memory of what is rarely needed
        goes_on = np.ones(len(values), np.bool_)
        for place in range(1, MAX_DIGITS):
            at -= 1
            digits = self._digits(at)
            goes_on &= digits < 10
            if not goes_on.any():
                return values.astype(np.int64)
            digits *= goes_on
            if place == _SMALL_DIGITS:
                values = values.astype(np.int64)
            values += digits * values.dtype.type(10**place)
        at -= 1
        goes_on &= self._digits(at) < 10
        values[goes_on] = -1  # as 64 bits have made of numbers of 19 digits that are too large
        return values

    def columns(self, first: Places, count: int) -> Ints:
        """Return the values of each number of `first` and those behind it [rows, count]."""
        return np.stack([self.values(first + number) for number in range(count)], axis=1)

    def _digits(self, places: Places) -> Bytes:
        digits: Bytes = self.bytes.take(places)
        digits -= np.uint8(48)
        return digits

    def line_starts(self, opening: bytes = b"") -> Places:
        """Return the numbers that begin a line, or have only `opening` before them in theirs."""
        before = b"\n" + opening
        return np.flatnonzero(self.has(self.starts - len(before), before))

    def follow(self, first: Places, gaps: Sequence[bytes]) -> Truths:
        """Say where the numbers behind `first` are set apart by `gaps`, one after another."""
        last = len(self.starts) - 1
        right: Truths = first + len(gaps) <= last
        for number, gap in enumerate(gaps):
            here = np.minimum(first + number, last)
            end = self.ends.take(here)
            right &= self.starts.take(np.minimum(here + 1, last)) - end == len(gap)
            right &= self.has(end, gap)
        return right

    def ends_line(self, places: Places) -> Truths:
        """Say for each of `places` whether the line's end stands there."""
        ended: Truths = self.bytes[places] == 10
        return ended

    def line_of(self, place: int) -> int:
        """Return the number of the line in which `place` lies."""
        return self.first_line + self.data.count(b"\n", BEFORE, place)

    def line_at(self, place: int) -> str:
        """Return the start of the line in which `place` lies, for a message."""
        start = self.data.rfind(b"\n", 0, place) + 1
        end = self.data.find(b"\n", place)
        return self.data[start : min(end, start + 100)].decode(errors="replace")


def word(text: bytes) -> np.uint64:
    """Return up to eight bytes as a little-endian number."""
    return np.uint64(int.from_bytes(text, "little"))


def texts(
    stream: TraceStream, length: int = PIECE_LENGTH, clean: Callable[[bytes], bytes] = bytes
) -> Iterator[Text]:
    """Cut a file into texts of whole lines of about `length` bytes, as `clean` leaves them.

    Raises what `whole_lines` raises.
    """
    for lines, is_cut in whole_lines(stream, length):
        text = Text(clean(lines), is_cut)
        yield Text(clean(without_blanks(lines)), is_cut) if _has_blanks(text) else text


def whole_lines(stream: TraceStream, length: int = PIECE_LENGTH) -> Iterator[tuple[bytes, bool]]:
    """Cut a file into whole lines that end with newlines, about `length` bytes of them at a time.

    The file may have any line ends, and a byte order mark before any line, as joined files have.
    Beside the lines it is said whether the last of them had no end. Raises TraceError for UTF-16,
    for zero bytes, and for a line without end.
    """
    if stream.peek(2) in (b"\xff\xfe", b"\xfe\xff"):
        hint = "iconv -f UTF-16 -t UTF-8 makes it readable"
        raise TraceError("not UTF-8 text but UTF-16", path=stream.path, hint=hint)
    offset, rest = 0, b""
    while data := stream.read(length):
        if b"\0" in data:
            raise TraceError("zero bytes in a text", path=stream.path, place=f"after byte {offset}")
        offset += len(data)
        data = rest + data
        # A last \r may be half of a line's end.
        known = len(data) - data.endswith(b"\r")
        data = plain_lines(data[:known]) + data[known:]
        end = data.rfind(b"\n") + 1
        lines, rest = data[:end], data[end:]
        if lines:
            yield lines, False
        elif len(rest) > MAX_LINE_LENGTH:
            raise TraceError(
                "line too long",
                path=stream.path,
                place=f"before byte {offset}",
                expected=f"up to {MAX_LINE_LENGTH:,} bytes",
            )
    if rest:
        yield plain_lines(rest.removesuffix(b"\r")) + b"\n", not rest.endswith(b"\r")


def plain_lines(data: bytes) -> bytes:
    """Let lines end with newlines alone, and begin with no byte order mark."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\xef" in data:
        data = data.removeprefix(_MARK).replace(b"\n" + _MARK, b"\n")
    return data


def without_blanks(lines: bytes) -> bytes:
    """Leave out the blanks around lines."""
    edged = b"\n" + lines + b"\n"
    if not any(edge in edged for edge in (b"\n ", b"\n\t", b" \n", b"\t\n")):
        return lines
    return b"\n".join(line.strip(b" \t") for line in lines.split(b"\n"))


def _has_blanks(text: Text) -> bool:
    """Say whether there are blanks around any line."""
    around = text.bytes.take(np.concatenate((text.line_ends - 1, text.line_ends + 1)))
    return bool(np.any((around == ord(" ")) | (around == ord("\t"))))
