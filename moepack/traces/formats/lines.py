"""Text files line by line, and the tokens of the selections that stand in them."""

import re
from array import array
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from moepack.common.errors import TraceError
from moepack.traces.compressed import TraceStream
from moepack.traces.model import Tokens, changes
from moepack.traces.validation import Checks

PIECE_LENGTH = 1 << 19
MAX_LINE_LENGTH = 16 << 20
MAX_CALL_SELECTIONS = 1 << 23
ENOUGH_SELECTIONS = 1 << 16
"""Selections that are passed on at once."""
_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, with which some programs begin a file."""
_HEAD_LENGTH = 1 << 20
_ROWS = 50
_ROWS_LENGTH = 1 << 16
_SHOWN_LENGTH = 100


class Lines:
    """The lines of a file without the blanks around them, in their order.

    `number` is that of the last line that was yielded, from 1; `is_cut` is whether it had no end.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._stream = stream
        self._checks = checks
        self._line = b""
        self.number = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines. Raises what `whole_lines` raises."""
        for lines, is_cut in whole_lines(self._stream):
            self.is_cut = is_cut
            for line in lines.split(b"\n")[:-1]:
                self.number += 1
                self._line = line.strip(b" \t")
                yield self._line

    def fault(self, problem: str, expected: str) -> None:
        """Report the last line; one without an end is reported as cut short."""
        self._checks.fault(
            "the last line is cut short" if self.is_cut else problem,
            f"line {self.number}",
            expected=expected,
            found=repr(self._line[:_SHOWN_LENGTH].decode(errors="replace")),
            hint="`lenient=True` leaves out and counts such lines",
        )


class Assembler:
    """Makes whole, checked tokens of selections.

    A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
    written layer by layer hold a call's tokens side by side, with numbers of their own.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._calls: list[tuple[int, int]] = []
        """The request and the phase of each."""
        self._rows = array("q")
        """Of each selection its call, token, layer and expert in one number, and line."""

    def begin_call(self, request: int, phase: int) -> Iterator[Tokens]:
        """Begin a call; yield the tokens of those before if they have enough selections."""
        if len(self._rows) >= 4 * ENOUGH_SELECTIONS:
            yield from self.end()
        self._calls.append((request, phase))

    def add(self, token: int, layer: int, expert: int, line: int) -> None:
        """Add a selection to the call."""
        self._rows.extend((len(self._calls), token, layer << 16 | expert, line))
        if len(self._rows) > 4 * (MAX_CALL_SELECTIONS + ENOUGH_SELECTIONS):
            problem = "one call, or token, with too many selections"
            raise self._checks.error(problem, expected=f"<= {MAX_CALL_SELECTIONS}")

    def end(self) -> Iterator[Tokens]:
        """Yield the tokens of all calls, if there are any."""
        rows = np.array(self._rows, np.int64).reshape(-1, 4)
        calls, self._calls, self._rows = self._calls, [], array("q")
        if not len(rows):
            return
        call, token = rows[:, 0], rows[:, 1]
        if np.any((token[1:] < token[:-1]) & (call[1:] == call[:-1])):
            rows = rows[np.lexsort((token, call))]  # stable: layers stay in their order
        call, token, keys, line = rows.T
        starts = np.flatnonzero(changes(call, token))
        request, phase = np.array(calls, np.int64)[call[starts] - 1].T
        layer, expert = (keys >> 16).astype(np.uint16), keys.astype(np.uint16)
        columns = np.append(starts, len(rows)), layer, expert
        tokens = Tokens(request, phase.astype(np.uint8), *columns)
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
