"""What the readers of all text formats share: rows with lists, and bad lines.

A format *parses* a text on its own; what it finds is *taken* in the order of the file, where tokens
go over the edges of texts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from moepack.trace.compressed import TraceStream
from moepack.trace.formats.number_text import Places, Text, Truths, texts
from moepack.trace.model import Dimensions, Ints, Piece
from moepack.trace.validation import Checks

Parsed = TypeVar("Parsed")
_MOST_STATED = 1 << 10
"""So much of a line is looked at for what a file says of its model, in bytes."""


class Fault(NamedTuple):
    """A line that is wrong: where in the text, what, and what was expected.

    `found` is what is wrong in it; nothing where that is the line.
    """

    place: int
    problem: str
    expected: str
    found: str = ""


class Lists(NamedTuple):
    """Rows that end in a list of numbers, as in `token layer expert expert`.

    `first` is each row's first number, `columns` [rows, fixed] the values before the list, `counts`
    the lengths of the lists, `items` all their values one after another.
    """

    first: Places
    columns: Ints
    counts: Ints
    items: Ints

    def owner(self) -> Ints:
        """Return the row of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def begins(self) -> Ints:
        """Return for each row the index of its first item."""
        return np.cumsum(self.counts) - self.counts


class TextFormat(Protocol[Parsed]):
    """One format of text."""

    def parse(self, text: Text) -> Parsed:
        """Find what is in a text, whatever comes before it."""
        ...

    def take(self, text: Text, parsed: Parsed) -> Iterator[Piece]:
        """Turn it into pieces of a trace, text after text."""
        ...

    def end(self) -> Iterator[Piece]:
        """Return what was held back."""
        ...


def read_rows(
    stream: TraceStream, form: TextFormat[Parsed], clean: Callable[[bytes], bytes] = bytes
) -> Iterator[Piece]:
    """Read a whole text in a format; `clean` leaves out of lines what does not matter.

    One thread does it: numpy's calls on pieces that fit into a cache are too short for threads.
    """
    line = 1
    for text in texts(stream, clean=clean):
        parsed = form.parse(text)
        text.first_line = line
        yield from form.take(text, parsed)
        line += text.line_count
    yield from form.end()


def report(checks: Checks, text: Text, faults: Sequence[Fault]) -> None:
    """Report bad lines; a last line without an end is called what it is."""
    for fault in faults:
        is_cut = text.is_cut and fault.place > text.line_ends[-2]
        checks.fault(
            "the last line is cut short" if is_cut else fault.problem,
            f"line {text.line_of(fault.place)}",
            expected=fault.expected,
            found=fault.found or repr(text.line_at(fault.place)),
            hint="`lenient=True` leaves out and counts such lines",
        )


def other_lines(text: Text, rows: Places) -> Places:
    """Return the places of the lines that are no rows, comments (`#`), or empty.

    `rows` are the numbers that rows begin with.
    """
    if text.line_count == len(rows):
        return np.zeros(0, np.intp)
    starts = text.line_ends[:-1] + 1
    others: Places = np.setdiff1d(starts, text.starts[rows], assume_unique=True)
    byte = text.bytes[others]
    unknown: Places = others[(byte != ord("#")) & (byte != 10)]
    return unknown


def no_rows(text: Text, others: Places, expected: str) -> list[Fault]:
    """Make faults of lines that are no rows."""
    return [Fault(int(place), "not a line of this format", expected) for place in others]


def rows_with_lists(text: Text, first: Places, gaps: Sequence[bytes], separator: bytes) -> Lists:
    """Read rows that begin with the numbers `first`: columns set apart by `gaps`, then a list.

    The last gap stands before the list, whose numbers `separator` sets apart; it ends with the
    line. Rows that are otherwise are left out.
    """
    beyond: Places
    if len(first) == text.line_count:  # all lines begin with a number, so a list ends there
        beyond = np.append(first[1:], len(text.starts))
    else:
        beyond = np.searchsorted(text.starts, text.line_ends[line_numbers(text, first)])
    follows = text.follow(first, gaps)
    first, beyond = first[follows], beyond[follows]
    lists = _lists(text, first, gaps, beyond)
    right = _all_joined(text, separator, first + len(gaps), beyond)
    right &= text.ends_line(text.ends[beyond - 1])
    return lists if right.all() else _lists(text, first[right], gaps, beyond[right])


def rows_in_brackets(text: Text, first: Places, gaps: Sequence[bytes]) -> Lists:
    """Read rows whose list is `expert,expert,…]`; what comes behind it does not matter."""
    first = first[text.follow(first, gaps)]
    closing = np.flatnonzero(text.bytes[text.ends] == ord("]"))
    if not len(closing):
        first = first[:0]
    end = np.searchsorted(closing, first + len(gaps))
    right = end < len(closing)
    first = first[right]
    beyond = closing[end[right]] + 1
    right = _all_joined(text, b",", first + len(gaps), beyond)
    return _lists(text, first[right], gaps, beyond[right])


def _all_joined(text: Text, separator: bytes, start: Places, beyond: Places) -> Truths:
    """Say which runs of numbers `start` to `beyond` have `separator` alone between each other."""
    joined = text.starts[1:] - text.ends[:-1] == len(separator)
    joined &= text.has(text.ends[:-1], separator)
    breaks = np.concatenate(([0], np.cumsum(~joined), [0]))
    last = np.maximum(beyond - 1, start)
    right: Truths = (beyond > start) & (breaks[last] == breaks[start])
    return right


def _lists(text: Text, first: Places, gaps: Sequence[bytes], beyond: Places) -> Lists:
    start = first + len(gaps)
    counts = np.maximum(beyond - start, 0)
    return Lists(first, text.columns(first, len(gaps)), counts, text.values(ranges(start, counts)))


def ranges(start: Places, counts: Ints) -> Places:
    """Return the numbers from each `start` on, `counts` of them, one range after another."""
    begins = np.cumsum(counts) - counts
    return np.repeat(start - begins, counts) + np.arange(int(counts.sum()))


def line_numbers(text: Text, numbers: Places) -> Places:
    """Return the index, in `line_ends`, of the end of the line in which each number lies."""
    lines: Places = np.searchsorted(text.line_ends, text.starts[numbers])
    return lines


def lines(text: Text, numbers: Places) -> Ints:
    """Return the number, in the file, of the line in which each number lies."""
    return line_numbers(text, numbers) + (text.first_line - 1)


def line_of(text: Text, numbers: Places) -> Callable[[int], str]:
    """Make what names the line of one of `numbers`, by its index, for a message."""
    return lambda index: f"line {text.line_of(int(text.starts[numbers[index]]))}"


def too_long(text: Text, place: int, number: int, expected: str) -> Fault:
    """Make the fault of a number out of bounds, as it stands in the file."""
    digits = text.data[text.starts[number] : text.ends[number]].decode()
    return Fault(place, "a number out of bounds", expected, digits)


class Statement(NamedTuple):
    """A line in which a file says what model it is of.

    `mark` is what it begins with: a newline first where that is the beginning of the line. `read`
    returns what the words behind the mark say, None for nothing.
    """

    mark: bytes
    read: Callable[[Sequence[str]], Dimensions | None]

    def check(self, text: Text, checks: Checks) -> None:
        """Hold all such lines of a text against what was said before, and against the model."""
        for place, stated in self._in(text):
            checks.state(stated, place)

    def check_first(self, head: bytes, checks: Checks) -> None:
        """Do so with the first of such lines among the first lines of a file."""
        text = Text(head[: head.rfind(b"\n") + 1])
        for place, stated in itertools.islice(self._in(text), 1):
            checks.state(stated, place)

    def _in(self, text: Text) -> Iterator[tuple[str, Dimensions]]:
        end = 0
        while (start := text.data.find(self.mark, end)) >= 0:
            start += len(self.mark)
            end = text.data.index(b"\n", start)
            line = text.data[start : min(end, start + _MOST_STATED)]
            stated = self.read(line.decode(errors="replace").split())
            if stated is not None:
                yield f"line {text.line_of(start)}", stated
