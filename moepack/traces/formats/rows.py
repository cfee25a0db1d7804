"""Lines of numbers in texts: reading all lines, and bad ones."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.assembler import Assembler
from moepack.traces.formats.number_text import Places, Text, texts
from moepack.traces.model import Ints, Piece
from moepack.traces.validation import Checks


class Fault(NamedTuple):
    """A bad line: its offset in the text, the problem, and the expected form.

    `part` is the bad part of the line; empty for all of it.
    """

    offset: int
    problem: str
    expected: str
    part: str = ""


class RowReader:
    """Reads rows of text; subclasses give the rows of each piece to the `_assembler`."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._assembler = Assembler(checks)

    def read(self, stream: TraceStream) -> Iterator[Piece]:
        """Read a whole text."""
        for text in texts(stream):
            yield from self._add(text)
        yield from self._end()

    def _add(self, text: Text) -> Iterator[Piece]:
        """Read the next text; yield the pieces of the trace that are complete."""
        raise NotImplementedError

    def _end(self) -> Iterator[Piece]:
        """Yield the tokens of the last call."""
        return self._assembler.end()


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


def other_lines(text: Text, rows: Places) -> Places:
    """Return the offsets of the lines that are no rows, comments (`#`), or empty.

    `rows` are the numbers that rows begin with.
    """
    if text.line_count == len(rows):
        return np.zeros(0, np.intp)
    starts = text.line_ends[:-1] + 1
    others: Places = np.setdiff1d(starts, text.starts[rows], assume_unique=True)
    byte = text.bytes[others]
    bad: Places = others[(byte != ord("#")) & (byte != 10)]
    return bad


def ranges(start: Places, counts: Ints) -> Places:
    """Return ranges of numbers, one after another: each from its `start`, as long as its count."""
    begins = np.cumsum(counts) - counts
    return np.repeat(start - begins, counts) + np.arange(int(counts.sum()))


def line_numbers(text: Text, numbers: Places) -> Places:
    """Return the index, in `line_ends`, of the end of the line in which each number lies."""
    lines: Places = np.searchsorted(text.line_ends, text.starts[numbers])
    return lines


def line_of(text: Text, numbers: Places) -> Callable[[int], str]:
    """Return a function that names the line of one of `numbers`, by its index, for a message."""
    return lambda index: f"line {text.line_of(int(text.starts[numbers[index]]))}"


def out_of_bounds(text: Text, row: int, columns: Sequence[int], expected: str) -> Fault:
    """Return the fault of the first column out of bounds in the row that begins with `row`."""
    number = row + next(index for index, value in enumerate(columns) if value < 0)
    digits = text.data[text.starts[number] : text.ends[number]].decode()
    return Fault(int(text.starts[row]), "a number out of bounds", expected, digits)
