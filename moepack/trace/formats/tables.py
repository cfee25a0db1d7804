"""Traces as tables: a line a selection, or a line a layer of a token with a list of experts."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from moepack.errors import TraceError
from moepack.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.trace.formats.call_rows import NumberedCalls, Table, with_faults
from moepack.trace.formats.number_text import Places, Text, Truths
from moepack.trace.formats.rows import (
    Lists,
    Statement,
    line_numbers,
    line_of,
    ranges,
    report,
    rows_with_lists,
)
from moepack.trace.model import MAX_NUMBER, Dimensions, Ints, Phase, Piece
from moepack.trace.validation import Checks

ROUTE_HEADING = b"turn,phase,step,layer,slot,expert,"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MODEL = re.compile(rb"^# model=(.*)$", re.M)
_MOST_LENGTH = 1 << 40
_LAYER = re.compile(rb"^# layer=(\d{1,5}) expert_bytes=(\d{1,15})\b", re.M)
CALL_HEADING = b"decode_call,token_in_call,layer,occurrence,experts"


def _dimensions(words: Sequence[str]) -> Dimensions:
    """Read `n_layer=N n_expert=N n_expert_used=N`, in any order, among other words."""
    found = dict(word.partition("=")[::2] for word in words)
    names = ("n_layer", "n_expert", "n_expert_used")
    texts = (found.get(name, "") for name in names)
    return Dimensions(*(int(text) if _NUMBER.fullmatch(text) else None for text in texts))


class TableFormat(NumberedCalls):
    """A table whose rows begin with numbers; `gaps` stand between the columns and the list."""

    headings: Sequence[bytes] = ()
    gaps: Sequence[bytes] = ()

    def parse(self, text: Text) -> Table:
        """Read the rows, and find the lines that are none."""
        lists = self.rows(text, text.line_starts())
        return with_faults(text, lists, self.expected, self.headings)

    def rows(self, text: Text, first: Places) -> Lists:
        """Read the rows that begin with the numbers `first`."""
        return rows_with_lists(text, first, self.gaps, b" ")


class CallTable(TableFormat):
    """CSV `decode_call,token_in_call,layer,occurrence,experts`, the experts set apart by spaces.

    Rows of a layer's second router (occurrence 1 and above) are left out and counted.
    """

    expected = CALL_HEADING.decode()
    headings = (CALL_HEADING,)
    gaps = (b",", b",", b",", b",")
    layer_column = 2

    def tokens(self, lists: Lists) -> Ints:
        """Return the token in its call."""
        return lists.columns[:, 1][lists.owner()]

    def taken(self, columns: Ints) -> Truths:
        """Take the main router's rows."""
        is_main: Truths = columns[:, 3] == 0
        self._checks.warn("rows of a layer's second router", int(np.count_nonzero(~is_main)))
        return is_main


class RouteTable(TableFormat):
    """CSV `turn,phase,step,layer,slot,expert,…` of BigMoeOnEdge, a row a selection.

    A turn is a request; phase 0 is prefill, which is written layer by layer, 1 is decode, others
    are unknown. A line `# model=… n_layer=… n_expert=… n_expert_used=…` says what model it was.
    """

    expected = ROUTE_HEADING.decode() + "…"
    headings = (ROUTE_HEADING,)
    gaps = (b",", b",", b",", b",", b",")
    layer_column = 3
    statement = Statement(b"\n# model=", _dimensions)

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._turn = self._request = -1

    def take(self, text: Text, parsed: Table) -> Iterator[Piece]:
        """Look as well for what the file says of the model."""
        self.statement.check(text, self._checks)
        yield from super().take(text, parsed)

    def rows(self, text: Text, first: Places) -> Lists:
        """Read six columns; what follows behind the sixth does not matter."""
        first = first[text.follow(first, self.gaps)]
        behind = text.ends[first + 5]
        first = first[(text.bytes[behind] == ord(",")) | text.ends_line(behind)]
        columns = text.columns(first, 5)
        return Lists(first, columns, np.ones(len(first), np.int64), text.values(first + 5))

    def calls(self, columns: Ints) -> Ints:
        """Tell decode steps apart, and prefills by their turn."""
        calls = columns[:, :3].copy()
        calls[columns[:, 1] == 0, 2] = 0
        return calls

    def tokens(self, lists: Lists) -> Ints:
        """Return the step."""
        return lists.columns[:, 2]

    def requests(self, columns: Ints) -> Ints:
        """Count the turns, whatever their numbers are."""
        turns = np.concatenate(([self._turn], columns[:, 0]))
        requests = self._request + np.cumsum(turns[1:] != turns[:-1])
        self._turn, self._request = int(turns[-1]), int(max(requests, default=self._request))
        return requests

    def phases(self, columns: Ints) -> Ints:
        """Translate the phase."""
        known = [columns[:, 1] == 0, columns[:, 1] == 1]
        return np.select(known, [Phase.PREFILL, Phase.DECODE], Phase.UNKNOWN)


class TokenTable(TableFormat):
    """Text `token layer expert expert…` of potatomaxx, a line a token and layer."""

    expected = "token layer expert…"
    gaps = (b" ", b" ")
    layer_column = 1


class GateTable(TableFormat):
    """Text `call row layer expert:gate expert:gate…` of colibri, a line a token and layer."""

    expected = "call row layer expert:gate…"
    gaps = (b" ", b" ", b" ")
    layer_column = 2

    def rows(self, text: Text, first: Places) -> Lists:
        """Take the numbers with a colon behind them and a space before.

        A row has as many spaces as that makes, and no others.
        """
        first = first[text.follow(first, self.gaps)]
        is_expert = text.has(text.ends, b":") & text.has(text.starts - 1, b" ")
        experts = np.flatnonzero(is_expert)
        spaces = np.flatnonzero(text.bytes == ord(" "))
        begin, end = text.starts[first], text.line_ends[line_numbers(text, first)]
        start = np.searchsorted(experts, first + len(self.gaps))
        counts = np.searchsorted(text.starts[experts], end) - start
        space_counts = np.searchsorted(spaces, end) - np.searchsorted(spaces, begin)
        right = (counts > 0) & (space_counts == counts + len(self.gaps) - 1)
        first, start, counts = first[right], start[right], counts[right]
        columns = text.columns(first, 3)
        items = text.values(experts[ranges(start, counts)])
        return Lists(first, columns, counts, items)

    def tokens(self, lists: Lists) -> Ints:
        """Return the row, which is a token of the call."""
        return lists.columns[:, 1][lists.owner()]


def route_shape(text: bytes) -> ModelShape | None:
    """Return the shape that the head of a `RouteTable`'s file states; None where it does not.

    It does in the line for the model, and one for each layer: `# layer=N expert_bytes=N …`. Raises
    TraceError for numbers that no model has, and for a layer that is stated twice, differently.
    """
    model = _MODEL.search(text)
    if model is None:
        return None
    stated = _dimensions(model[1].decode(errors="replace").split())
    lengths: dict[int, int] = {}
    for line in _LAYER.finditer(text):
        layer, length = int(line[1]), int(line[2])
        if lengths.setdefault(layer, length) != length:
            problem = "two lengths of an expert"
            place = f"layer {layer}"
            raise TraceError(
                problem, place=place, expected=f"{lengths[layer]:,}", found=f"{length:,}"
            )
    expert_count = stated.expert_count
    if expert_count is None or not any(lengths.values()):
        return None
    used = stated.experts_used
    if (
        not 0 < expert_count <= MAX_NUMBER + 1
        or max(lengths) > MAX_NUMBER
        or max(lengths.values()) > _MOST_LENGTH
        or not 0 < (used or 1) <= expert_count
    ):
        found = f"{expert_count:,} experts, {used} used, layers up to {max(lengths):,}"
        found += f", up to {max(lengths.values()):,} bytes"
        raise TraceError("what is stated of the model is of no model", found=found)
    return ModelShape(
        tuple(
            FamilyShape(layer, ROUTED_FAMILY, expert_count, length, used)
            for layer, length in sorted(lengths.items())
            if length
        )
    )


def _usage_dimensions(words: Sequence[str]) -> Dimensions | None:
    """Read the last layer, and the number of experts."""
    if len(words) != 2 or not all(map(_NUMBER.fullmatch, words)):
        return None
    return Dimensions(int(words[0]) + 1, int(words[1]))


class UsageTable:
    """Text `layer expert count` of colibri.

    A line `-1 48 128` says that layers go up to 48, which is the one for multi-token prediction,
    and that each has 128 experts; one that begins with `-2` is ignored (route_trace.h, 2026).
    """

    expected = "layer expert count"
    statement = Statement(b"\n-1 ", _usage_dimensions)
    _ignored = (b"-1 ", b"-2 ")

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def parse(self, text: Text) -> Table:
        """Read rows of three columns."""
        first = text.line_starts()
        first = first[text.follow(first, (b" ", b" "))]
        first = first[text.ends_line(text.ends[first + 2])]
        ones = np.ones(len(first), np.int64)
        lists = Lists(first, text.columns(first, 2), ones, text.values(first + 2))
        return with_faults(text, lists, self.expected, self._ignored)

    def take(self, text: Text, parsed: Table) -> Iterator[Piece]:
        """Check the counts."""
        self.statement.check(text, self._checks)
        report(self._checks, text, parsed.faults)
        lists = parsed.lists
        layer, expert = lists.columns[:, 0], lists.columns[:, 1]
        place_of = line_of(text, lists.first)
        counts = self._checks.counts(Phase.UNKNOWN, layer, expert, lists.items, place_of)
        if len(counts.layer):
            yield counts

    def end(self) -> Iterator[Piece]:
        """Nothing is held back."""
        return iter(())
