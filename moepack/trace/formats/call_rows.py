"""Rows with a list of experts each: how such rows become tokens, whatever they look like."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moepack.trace.formats.assembler import Assembler, Rows
from moepack.trace.formats.number_text import Places, Text, Truths
from moepack.trace.formats.rows import (
    Fault,
    Lists,
    line_of,
    lines,
    no_rows,
    other_lines,
    ranges,
    report,
    too_long,
)
from moepack.trace.model import Ints, Phase, Piece
from moepack.trace.validation import Checks, shorts


class Table(NamedTuple):
    """Rows with a list each, and the lines that are none."""

    lists: Lists
    faults: list[Fault]


class ListFormat:
    """What formats of such rows share; each says which calls and tokens its rows are of.

    `layer_column` is the column of the layer, `expected` what a row looks like, for messages.
    """

    expected = ""
    layer_column = 0

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._assembler = Assembler(checks)

    def taken(self, columns: Ints) -> Truths | None:
        """Say which rows are to be taken; None for all."""
        return None

    def begins(self, columns: Ints) -> Places:
        """Find the rows that begin a call; called once for each text, in order."""
        raise NotImplementedError

    def requests(self, columns: Ints) -> Ints:
        """Return the request of each row."""
        return np.zeros(len(columns), np.int64)

    def phases(self, columns: Ints) -> Ints:
        """Return the phase of each row."""
        return np.full(len(columns), Phase.UNKNOWN, np.int64)

    def tokens(self, lists: Lists) -> Ints | None:
        """Return for each item the number of its token in the call; None where a call is one."""
        return None

    def take(self, text: Text, parsed: Table) -> Iterator[Piece]:
        """Cut the rows into calls, and give the selections of each."""
        report(self._checks, text, parsed.faults)
        taken = self.taken(parsed.lists.columns)
        lists = parsed.lists if taken is None else keep(parsed.lists, taken)
        if not len(lists.first):
            return
        owner = lists.owner()
        layer = lists.columns[:, self.layer_column][owner]
        right = self._checks.fitting(layer, lists.items, line_of(text, lists.first[owner]))
        if right is not None:
            lists = _keep_items(lists, right)
            if not len(lists.first):
                return
            owner = lists.owner()
            layer = lists.columns[:, self.layer_column][owner]
        calls = self.begins(lists.columns)
        called = lists.columns[calls]
        yield from self._assembler.add(
            Rows(
                lists.begins()[calls],
                self.requests(called),
                self.phases(called).astype(np.uint8),
                shorts(layer),
                shorts(lists.items),
                lines(text, lists.first)[owner],
                self.tokens(lists),
            )
        )

    def end(self) -> Iterator[Piece]:
        """Return the last call's tokens."""
        return iter(self._assembler.end())


class NumberedCalls(ListFormat):
    """Rows that say which call they are of, in one or several columns."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._last_call: tuple[int, ...] = ()

    def calls(self, columns: Ints) -> Ints:
        """Return what tells the calls of the rows apart [rows, numbers]."""
        return columns[:, :1]

    def begins(self, columns: Ints) -> Places:
        """Find where that changes."""
        calls = self.calls(columns)
        changed = np.ones(len(calls), np.bool_)
        changed[1:] = np.any(calls[1:] != calls[:-1], axis=1)
        changed[0] = tuple(calls[0]) != self._last_call
        self._last_call = tuple(calls[-1])
        return np.flatnonzero(changed)


class LayerCalls(ListFormat):
    """Rows of a layer and call: a call begins where the number of the layer does not rise.

    `count_column` says how many tokens a call has: several are prefill.
    """

    count_column = 1

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._last_layer = 1 << 62

    def begins(self, columns: Ints) -> Places:
        """Find where the layer does not rise."""
        layers = np.concatenate(([self._last_layer], columns[:, self.layer_column]))
        self._last_layer = int(layers[-1])
        return np.flatnonzero(layers[1:] <= layers[:-1])

    def phases(self, columns: Ints) -> Ints:
        """Tell prefill and decode apart by the number of tokens."""
        return np.where(columns[:, self.count_column] > 1, Phase.PREFILL, Phase.DECODE)


def keep(lists: Lists, kept: Truths) -> Lists:
    """Keep some of the rows."""
    if kept.all():
        return lists
    items = lists.items[ranges(lists.begins()[kept], lists.counts[kept])]
    return Lists(lists.first[kept], lists.columns[kept], lists.counts[kept], items)


def _keep_items(lists: Lists, kept: Truths) -> Lists:
    """Keep some of the items, and the rows that have any of them."""
    counts = np.bincount(lists.owner()[kept], minlength=len(lists.counts))
    rows = counts > 0
    return Lists(lists.first[rows], lists.columns[rows], counts[rows], lists.items[kept])


def with_faults(text: Text, lists: Lists, expected: str, headings: Sequence[bytes] = ()) -> Table:
    """Find the lines that are no rows and do not begin with one of `headings`."""
    others = other_lines(text, lists.first)
    for heading in headings:
        others = others[~text.has(others, heading)]
    return without_large(text, lists, expected, no_rows(text, others, expected))


def without_large(text: Text, lists: Lists, expected: str, faults: list[Fault]) -> Table:
    """Leave out the rows with numbers out of bounds, and add them to the faults."""
    large = np.any(lists.columns < 0, axis=1)
    large[lists.owner()[lists.items < 0]] = True
    for row in np.flatnonzero(large):
        number = _first_large(text, int(lists.first[row]))
        faults.append(too_long(text, int(text.starts[lists.first[row]]), number, expected))
    return Table(keep(lists, ~large), sorted(faults))


def _first_large(text: Text, number: int) -> int:
    """Return the first number out of bounds, from a row's first on."""
    while text.values(np.array([number]))[0] >= 0:
        number += 1
    return number
