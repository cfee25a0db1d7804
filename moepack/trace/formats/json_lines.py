"""Traces of a JSON object a line: Anemll's and MER's."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from moepack.trace.formats.call_rows import (
    LayerCalls,
    ListFormat,
    NumberedCalls,
    Table,
    keep,
    without_large,
)
from moepack.trace.formats.number_text import Text
from moepack.trace.formats.rows import Fault, Lists, rows_in_brackets
from moepack.trace.model import Ints


class JsonLines(ListFormat):
    """What both share. Lines written as the engines do are read as arrays, others as JSON.

    `keys` are those of the columns, in the order in which an engine writes them.
    """

    keys: Sequence[str] = ()

    def parse(self, text: Text) -> Table:
        """Read all lines as arrays, or, where any is written in another way, all as JSON."""
        first = text.line_starts(b'{"%s":' % self.keys[0].encode())
        gaps = [b',"%s":' % key.encode() for key in self.keys[1:]]
        lists = rows_in_brackets(text, first, [*gaps, b',"experts":['])
        if len(lists.first) == text.line_count and _is_one_object_a_line(text):
            return without_large(text, lists, self.expected, [])
        return self._parse_json(text)

    def _parse_json(self, text: Text) -> Table:
        first, columns, counts, items = [], [], [], []
        faults = []
        for start, end in zip(text.line_ends[:-1] + 1, text.line_ends[1:], strict=True):
            line = text.data[start:end].strip()
            row = self._row(line)
            if row is not None:
                first.append(np.searchsorted(text.starts, start))
                columns.append(row[0])
                counts.append(len(row[1]))
                items.extend(row[1])
            elif line:
                faults.append(Fault(int(start), "not a line of this format", self.expected))
        table = np.array(columns, np.int64).reshape(-1, len(self.keys))
        lists = Lists(np.array(first, np.intp), table, *map(_integers, (counts, items)))
        return Table(lists, faults)

    def _row(self, line: bytes) -> tuple[list[int], list[int]] | None:
        try:
            row = json.loads(line)
            columns = [row[key] for key in self.keys]
            experts = row["experts"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(experts, list) or not all(map(_is_count, [*columns, *experts])):
            return None
        return columns, experts


class AnemllLines(LayerCalls, JsonLines):
    """`{"seq":…,"layer":…,"n_expert_used":…,"n_tokens":…,"experts":[…],…}`, one a layer and call.

    The experts of a call of several tokens are those of the first, then those of the second.
    """

    keys = ("seq", "layer", "n_expert_used", "n_tokens")
    expected = '{"seq":…,"layer":…,"n_expert_used":…,"n_tokens":…,"experts":[…]}'
    layer_column = 1
    count_column = 3

    def parse(self, text: Text) -> Table:
        """Check as well that each line has as many experts as it says."""
        lists, faults = super().parse(text)
        right = lists.columns[:, 2] * lists.columns[:, 3] == lists.counts
        for number in lists.first[~right]:
            place = int(text.starts[number])
            expected = "n_expert_used times n_tokens experts"
            faults.append(Fault(place, "not as many experts as it says", expected))
        return Table(keep(lists, right), sorted(faults))

    def tokens(self, lists: Lists) -> Ints:
        """Count off the experts of each token."""
        owner = lists.owner()
        place = np.arange(len(owner)) - lists.begins()[owner]
        token: Ints = place // np.maximum(lists.columns[owner, 2], 1)
        return token


class MerLines(NumberedCalls, JsonLines):
    """`{"token":…,"layer":…,"experts":[…],…}`, one a token and layer."""

    keys = ("token", "layer")
    expected = '{"token":…,"layer":…,"experts":[…]}'
    layer_column = 1


def _is_one_object_a_line(text: Text) -> bool:
    """Say whether each line ends with the only object in it; two may have been glued together."""
    closes = bool(np.all(text.bytes[text.line_ends[1:] - 1] == ord("}")))
    return closes and int(np.count_nonzero(text.bytes == ord("{"))) == text.line_count


def _integers(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31
