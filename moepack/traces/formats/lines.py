"""Text files: their rows of numbers, and the tokens of the selections in them."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.traces.compressed import TraceStream
from moepack.traces.model import Ints, Tokens, changes
from moepack.traces.validation import Checks, shorts

PIECE_LENGTH = 1 << 19
MAX_LINE_LENGTH = 16 << 20
MAX_CALL_SELECTIONS = 1 << 23
BLANKS = re.compile(rb"[ \t]*,[ \t]*")
_AS_BLANKS = bytes.maketrans(b",\n", b"  ")
_LETTERS = b"aelprtxy"
"""Of `layer` and `expert`."""
_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, with which some programs begin a file."""
_HEAD_LENGTH = 1 << 20
_ROWS = 50
_ROWS_LENGTH = 1 << 16
_SHOWN_LENGTH = 100


class Lines:
    """The lines of a file, in their order.

    `number` is that of the last one so far, from 1; `is_cut` is whether it had no end.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._stream = stream
        self._checks = checks
        self.number = 0
        self.is_cut = False

    def rows(
        self, pattern: re.Pattern[bytes], on_other: Callable[[bytes], object]
    ) -> Iterator[tuple[bytes, Ints]]:
        """Yield rows, with their newlines, many together; and the numbers of these lines.

        `pattern` matches one row or more, in which no blanks stand beside commas. Other lines go to
        `on_other`. Raises what `whole_lines` raises.
        """
        for lines, is_cut in whole_lines(self._stream):
            self.is_cut, end = is_cut, 0
            while end < len(lines):
                start, match = end, pattern.match(lines, end)
                end = match.end() if match else lines.index(b"\n", start) + 1
                line = lines[start:end].strip(b" \t\n")
                if match is None and not line.startswith(b"#"):
                    match = pattern.fullmatch(BLANKS.sub(b",", line) + b"\n")
                if match is None:
                    self.number += 1
                    on_other(line)
                    continue
                count = match[0].count(b"\n")
                self.number += count
                yield match[0], np.arange(count) + self.number - count + 1

    def fault(self, problem: str, expected: str, line: bytes, number: int | None = None) -> None:
        """Report a line, by default the last; one without an end is reported as cut short."""
        self._checks.fault(
            "the last line is cut short" if self.is_cut else problem,
            f"line {self.number if number is None else number}",
            expected=expected,
            found=repr(line[:_SHOWN_LENGTH].decode(errors="replace")),
            hint="`lenient=True` leaves out and counts such lines",
        )


def numbers_in(rows: bytes) -> NDArray[np.uint64]:
    """Return all numbers of rows, of up to 19 digits, without the words beside them."""
    return np.fromstring(rows.translate(_AS_BLANKS, _LETTERS), np.uint64, sep=" ")


class Assembler:
    """Makes whole, checked tokens of selections.

    A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
    written layer by layer hold a call's tokens side by side, with numbers of their own.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._head: Ints = np.full(3, -1, np.int64)
        """That of the last selection."""
        self._request = self._call = -1
        self._parts: list[Sequence[NDArray[Any]]] = []
        """Of the selections of the last call: request, phase, call, token, layer, expert, line."""
        self._count = 0

    def add(
        self, heads: Ints, token: Ints, layer: Ints, expert: Ints, line: Ints
    ) -> Iterator[Tokens]:
        """Add selections that the model can have made; yield the tokens of all calls but the last.

        `heads` [selections, 3] differ from one call to the next, their first column from one
        request to the next; the second is the phase.
        """
        right = self._checks.fitting(layer, expert, lambda index: f"line {line[index]}")
        selections = heads, token, layer, expert, line
        heads, token, layer, expert, line = (column[right] for column in selections)
        if not len(heads):
            return
        differs = np.diff(heads, axis=0, prepend=self._head[None]) != 0
        request = self._request + np.cumsum(differs[:, 0])
        call = self._call + np.cumsum(differs.any(axis=1))
        self._head, self._request, self._call = heads[-1], request[-1], call[-1]
        phase = heads[:, 1].astype(np.uint8)
        columns = request, phase, call, token, shorts(layer), shorts(expert), line
        begin = int(np.searchsorted(call, self._call))
        if begin or differs[0].any():
            self._parts.append([column[:begin] for column in columns])
            yield from self.end()
        self._parts.append([column[begin:] for column in columns])
        self._count += len(call) - begin
        if self._count > MAX_CALL_SELECTIONS:
            problem = "one call, or token, with too many selections"
            raise self._checks.error(problem, expected=f"<= {MAX_CALL_SELECTIONS}")

    def end(self) -> Iterator[Tokens]:
        """Yield the tokens of all calls, if there are any."""
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        self._parts, self._count = [], 0
        if not columns or not len(columns[0]):
            return
        call, token = columns[2:4]
        if np.any((token[1:] < token[:-1]) & (call[1:] == call[:-1])):
            order = np.lexsort((token, call))  # stable: layers stay in their order
            columns = [column[order] for column in columns]
        request, phase, call, token, layer, expert, line = columns
        starts = np.flatnonzero(changes(call, token))
        ends = np.append(starts, len(call))
        tokens = Tokens(request[starts], phase[starts], ends, layer, expert)
        yield self._checks.tokens(tokens, lambda index: f"line {line[index]}")


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


class FileHead:
    """The first bytes of a file, unpacked: as they are, and as lines of text."""

    def __init__(self, stream: TraceStream) -> None:
        self.data = stream.peek(_HEAD_LENGTH)

    @cached_property
    def text(self) -> bytes:
        """The lines as they will be read; the last may be cut."""
        return re.sub(rb"^[ \t]+|[ \t]+$", b"", plain_lines(self.data), flags=re.MULTILINE)

    @cached_property
    def rows(self) -> list[bytes]:
        """The first lines that are neither comments nor empty, without one that may be cut."""
        lines = self.text[:_ROWS_LENGTH].split(b"\n")
        lines = lines if len(lines) == 1 else lines[:-1]
        return [line for line in lines if line and not line.startswith(b"#")][:_ROWS]
