"""Text with many numbers, as arrays: no line is ever a Python string.

A text file is cut into pieces of whole lines. In each piece every run of digits is located; the
text between them tells the format. Selections that stand in them become tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.traces.compressed import TraceStream
from moepack.traces.model import Bytes, Ints, Shorts, Tokens, changes
from moepack.traces.validation import Checks

PIECE_LENGTH = 1 << 19
"""Long enough that numpy's calls are few, and short enough for a processor's cache."""
MAX_LINE_LENGTH = 16 << 20
MAX_DIGITS = 19
"""Of a number below 2^63."""
MAX_CALL_SELECTIONS = 1 << 23
_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, with which some programs begin a file."""
_FRONT = b"\0" * 31 + b"\n"
_BACK = b"\0" * 96
"""So many bytes can be looked at from any place in a text on, and before its first line."""
_HEAD_LENGTH = 1 << 20
_ROWS = 50
_ROWS_LENGTH = 1 << 16

Places = NDArray[np.intp]
Truths = NDArray[np.bool_]


class Text:
    """Some whole lines, as bytes, and where the numbers in them are.

    `data` begins with a newline and ends with one (and zeros beyond both, so that looking there is
    safe); there are no other line ends, and no blanks around lines. Number n is the run of digits
    `data[starts[n]:ends[n]]`. `first_line` is the number, from 1, of the first line in the file.
    `is_cut` is whether the file ended without a newline.
    """

    def __init__(self, lines: bytes, first_line: int, is_cut: bool) -> None:
        self.data = b"".join((_FRONT, lines, _BACK))
        self.first_line = first_line
        self.is_cut = is_cut
        self.bytes: Bytes = np.frombuffer(self.data, np.uint8)

    @cached_property
    def _edges(self) -> Places:
        is_digit = (self.bytes - np.uint8(48)) < 10
        edges: Places = np.flatnonzero(is_digit[1:] != is_digit[:-1])
        edges += 1
        return edges

    @cached_property
    def starts(self) -> Places:
        """The offsets where numbers begin."""
        return np.ascontiguousarray(self._edges[0::2])

    @cached_property
    def ends(self) -> Places:
        """The offsets where they end."""
        return np.ascontiguousarray(self._edges[1::2])

    @cached_property
    def line_ends(self) -> Places:
        """The offsets of newlines, with the one before the first line."""
        return np.flatnonzero(self.bytes == 10)

    @property
    def line_count(self) -> int:
        """The number of lines."""
        return len(self.line_ends) - 1

    def has(self, places: Places, text: bytes) -> Truths:
        """Return whether `text` is at each of `places`."""
        assert len(text) < len(_BACK), "there are zeros behind a text, but not for ever"
        count = len(self.data) - len(text)
        strings = np.ndarray(count, f"S{len(text)}", self.data, strides=(1,))
        is_there: Truths = strings[places] == text
        return is_there

    def values(self, numbers: Places) -> Ints:
        """Return the values of some numbers; those from 2^63 on are negative."""
        at = self.ends.take(numbers)
        at -= 1
        values: Ints = self._digits(at).astype(np.int64)
        goes_on = np.ones(len(values), np.bool_)
        for place in range(1, MAX_DIGITS):
            at -= 1
            digits = self._digits(at)
            goes_on &= digits < 10
            if not goes_on.any():
                return values
            digits *= goes_on
            values += digits * np.int64(10**place)
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

    def rows(self, gaps: Sequence[bytes], before: bytes = b"\n") -> Places:
        """Return the numbers behind `before` that others follow, with `gaps` between them."""
        first = np.flatnonzero(self.has(self.starts - len(before), before))
        first = first[first < len(self.starts) - len(gaps)]
        for number, gap in enumerate(gaps):
            ends = self.ends.take(first + number)
            is_near = self.starts.take(first + number + 1) - ends == len(gap)
            first = first[is_near & self.has(ends, gap)]
        return first

    def ends_line(self, places: Places) -> Truths:
        """Return whether a line ends at each of `places`."""
        ended: Truths = self.bytes[places] == 10
        return ended

    def line_of(self, place: int) -> int:
        """Return the number of the line in which `place` lies."""
        return self.first_line + self.data.count(b"\n", len(_FRONT), place)

    def lines_of(self, places: Places) -> Places:
        """Return the number of the line in which each place lies."""
        lines: Places = np.searchsorted(self.line_ends, places) + (self.first_line - 1)
        return lines

    def last_of_lines(self, numbers: Places) -> Places:
        """Return the last number in the line in which each lies."""
        ends = self.line_ends[np.searchsorted(self.line_ends, self.starts[numbers])]
        last: Places = np.searchsorted(self.starts, ends) - 1
        return last

    def place_of(self, numbers: Places) -> Callable[[int], str]:
        """Return a function that names the line of one of `numbers`, by its index."""
        return lambda index: f"line {self.line_of(int(self.starts[numbers[index]]))}"

    def other_lines(self, rows: Places) -> Places:
        """Return the offsets of the lines that are no rows, comments (`#`), or empty.

        `rows` are the numbers that rows begin with.
        """
        if self.line_count == len(rows):
            return np.zeros(0, np.intp)
        lines = self.line_ends[:-1] + 1
        others: Places = np.setdiff1d(lines, self.starts[rows], assume_unique=True)
        byte = self.bytes[others]
        bad: Places = others[(byte != ord("#")) & (byte != 10)]
        return bad

    def line_at(self, place: int) -> str:
        """Return the start of the line in which `place` lies, for a message."""
        start = self.data.rfind(b"\n", 0, place) + 1
        end = self.data.find(b"\n", place)
        return self.data[start : min(end, start + 100)].decode(errors="replace")


class Fault(NamedTuple):
    """A bad line: its offset in the text, the problem, and the expected form.

    `part` is the bad part of the line; empty for all of it.
    """

    offset: int
    problem: str
    expected: str
    part: str = ""


def report(checks: Checks, text: Text, faults: Sequence[Fault]) -> None:
    """Report bad lines; a last line without an end is reported as cut short."""
    for fault in sorted(faults):
        is_cut = text.is_cut and fault.offset > text.line_ends[-2]
        checks.fault(
            "the last line is cut short" if is_cut else fault.problem,
            f"line {text.line_of(fault.offset)}",
            expected=fault.expected,
            found=fault.part or repr(text.line_at(fault.offset)),
            hint="`lenient=True` leaves out and counts such lines",
        )


def out_of_bounds(text: Text, rows: Places, expected: str) -> list[Fault]:
    """Return the faults of rows with a number out of bounds; `rows` are their first numbers."""
    faults = []
    for row, last in zip(rows.tolist(), text.last_of_lines(rows).tolist(), strict=True):
        number = row + int(np.argmax(text.values(np.arange(row, last + 1)) < 0))
        digits = text.data[text.starts[number] : text.ends[number]].decode()
        faults.append(Fault(int(text.starts[row]), "a number out of bounds", expected, digits))
    return faults


class Rows(NamedTuple):
    """Selections in the order of a file: a number each; requests and calls never fall.

    A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
    written layer by layer hold a call's tokens side by side: `token` numbers them. `line` is that
    of the file.
    """

    request: Ints
    phase: Bytes
    call: Ints
    token: Ints
    layer: Shorts
    expert: Shorts
    line: Ints

    def part(self, rows: slice | Places) -> "Rows":
        """Return some of them."""
        return Rows._make(column[rows] for column in self)


class Assembler:
    """Makes whole, checked tokens of rows; the last call waits until the next one begins."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._waiting: list[Rows] = []
        self._waiting_count = 0

    def add(self, rows: Rows) -> Iterator[Tokens]:
        """Add rows, one at least; yield the tokens that are complete."""
        if not self._waiting or self._waiting[-1].call[-1] != rows.call[-1]:
            last = int(np.searchsorted(rows.call, rows.call[-1]))
            self._keep(rows.part(slice(last)))
            yield from self.end()
            rows = rows.part(slice(last, None))
        self._keep(rows)

    def end(self) -> Iterator[Tokens]:
        """Yield the tokens of the last call."""
        waiting, self._waiting, self._waiting_count = self._waiting, [], 0
        if not waiting:
            return
        rows = Rows._make(map(np.concatenate, zip(*waiting, strict=True)))
        call, token = rows.call, rows.token
        if np.any((token[1:] < token[:-1]) & (call[1:] == call[:-1])):
            rows = rows.part(np.lexsort((token, call)))  # stable: layers stay in their order
        starts = np.flatnonzero(changes(rows.call, rows.token))
        columns = (np.append(starts, len(rows.line)), rows.layer, rows.expert)
        tokens = Tokens(rows.request[starts], rows.phase[starts], *columns)
        yield self._checks.tokens(tokens, lambda index: f"line {rows.line[index]}")

    def _keep(self, rows: Rows) -> None:
        if len(rows.line):
            self._waiting.append(rows)
        self._waiting_count += len(rows.line)
        if self._waiting_count > MAX_CALL_SELECTIONS:
            problem = "one call, or token, with too many selections"
            raise self._checks.error(problem, expected=f"<= {MAX_CALL_SELECTIONS}")


class Runs:
    """Numbers runs of equal rows from 0, over all texts of a file."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._number = -1

    def numbers(self, *columns: Ints) -> Ints:
        """Return the run of each row; there is one at least."""
        begins = changes(*columns)
        begins[0] = self._last != tuple(int(column[0]) for column in columns)
        self._last = tuple(int(column[-1]) for column in columns)
        numbers: Ints = self._number + np.cumsum(begins)
        self._number = int(numbers[-1])
        return numbers


def texts(stream: TraceStream, clean: Callable[[bytes], bytes] = bytes) -> Iterator[Text]:
    """Cut a file into texts of whole lines, as `clean` leaves them.

    One thread reads them: numpy's calls on pieces that fit into a cache are too short for threads.
    Raises what `whole_lines` raises.
    """
    first_line = 1
    for lines, is_cut in whole_lines(stream):
        text = Text(clean(lines), first_line, is_cut)
        around = text.bytes.take(np.concatenate((text.line_ends - 1, text.line_ends + 1)))
        if np.any((around == ord(" ")) | (around == ord("\t"))):
            text = Text(clean(without_blanks(lines)), first_line, is_cut)
        yield text
        first_line += text.line_count


def whole_lines(stream: TraceStream) -> Iterator[tuple[bytes, bool]]:
    """Yield the whole lines of a file, about PIECE_LENGTH bytes at a time.

    They end with newlines. The file may have any line ends, and a byte order mark before any line,
    as joined files have. The second item is whether the last line had no end. Raises TraceError for
    UTF-16, for zero bytes, and for a line without end.
    """
    refuse_utf16(stream)
    offset, rest = 0, b""
    while data := stream.read(PIECE_LENGTH):
        if b"\0" in data:
            raise TraceError("zero bytes in a text", path=stream.path, place=f"after byte {offset}")
        offset += len(data)
        data = rest + data
        # A last \r may be half of a line's end.
        whole = len(data) - data.endswith(b"\r")
        data = plain_lines(data[:whole]) + data[whole:]
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


def refuse_utf16(stream: TraceStream) -> None:
    """Raise TraceError if a file begins as UTF-16."""
    if stream.peek(2) in (b"\xff\xfe", b"\xfe\xff"):
        hint = "iconv -f UTF-16 -t UTF-8 makes it readable"
        raise TraceError("not UTF-8 text but UTF-16", path=stream.path, hint=hint)


def plain_lines(data: bytes) -> bytes:
    """Normalise line ends to newlines, and drop a byte order mark."""
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


class FileHead:
    """The first bytes of a file, unpacked: as they are, and as lines of text."""

    def __init__(self, stream: TraceStream) -> None:
        self.data = stream.peek(_HEAD_LENGTH)

    @cached_property
    def text(self) -> bytes:
        """The lines as they will be read; the last may be cut."""
        return without_blanks(plain_lines(self.data))

    @cached_property
    def rows(self) -> list[bytes]:
        """The first lines that are neither comments nor empty, without one that may be cut."""
        lines = self.text[:_ROWS_LENGTH].split(b"\n")
        lines = lines if len(lines) == 1 else lines[:-1]
        return [line for line in lines if line and not line.startswith(b"#")][:_ROWS]
