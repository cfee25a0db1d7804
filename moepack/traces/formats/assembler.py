"""Assembling tokens from selections, across the pieces of a file.

A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
written layer by layer hold a call's tokens side by side; here they are put one after another.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moepack.traces.model import Bytes, Ints, Shorts, Tokens, changes
from moepack.traces.validation import Checks

MAX_CALL_SELECTIONS = 1 << 23


class Rows(NamedTuple):
    """Selections in the order of a file; calls begin at the indices `starts`, which rise.

    Selections before the first start belong to the call before. `request` and `phase` have an item
    for each start. `token` numbers the tokens of a call; without it each call is one token. `place`
    is the line, or byte, of each selection.
    """

    starts: Ints
    request: Ints
    phase: Bytes
    layer: Shorts
    expert: Shorts
    place: Ints
    token: Ints | None = None


class Assembler:
    """Makes whole, checked tokens of rows; the last call waits until the next one begins.

    `unit` is that of places, for messages.
    """

    def __init__(self, checks: Checks, unit: str = "line") -> None:
        self._checks = checks
        self._unit = unit
        self._waiting: list[Rows] = []
        self._waiting_count = 0

    def add(self, rows: Rows) -> Iterator[Tokens]:
        """Add rows; yield the tokens that are complete."""
        if len(rows.starts):
            last = int(rows.starts[-1])
            self._keep(_part(rows, slice(None, last), slice(None, -1)))
            yield from self.end()
            rows = _part(rows, slice(last, None), slice(-1, None))
        self._keep(rows)

    def end(self) -> Iterator[Tokens]:
        """Yield the tokens of the last call."""
        waiting, self._waiting = self._waiting, []
        self._waiting_count = 0
        if any(len(rows.layer) for rows in waiting):
            tokens, place = _to_tokens(_join(waiting))
            yield self._checks.tokens(tokens, lambda index: f"{self._unit} {place[index]}")

    def _keep(self, rows: Rows) -> None:
        self._waiting.append(rows)
        self._waiting_count += len(rows.layer)
        if self._waiting_count > MAX_CALL_SELECTIONS:
            problem = "one call, or token, with too many selections"
            expected = f"<= {MAX_CALL_SELECTIONS}"
            raise self._checks.error(problem, expected=expected)


def _part(rows: Rows, selections: slice, calls: slice) -> Rows:
    """Return some of the rows, and those calls that begin among them."""
    return Rows(
        rows.starts[calls] - (selections.start or 0),
        rows.request[calls],
        rows.phase[calls],
        rows.layer[selections],
        rows.expert[selections],
        rows.place[selections],
        None if rows.token is None else rows.token[selections],
    )


def _join(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    lengths = np.cumsum([0, *(len(rows.layer) for rows in parts)])
    starts = [rows.starts + before for rows, before in zip(parts, lengths, strict=False)]
    tokens = [rows.token for rows in parts if rows.token is not None]
    columns = zip(*(rows[1:6] for rows in parts), strict=True)
    request, phase, layer, expert, place = map(np.concatenate, columns)
    token = np.concatenate(tokens) if tokens else None
    return Rows(np.concatenate(starts), request, phase, layer, expert, place, token)


def _to_tokens(rows: Rows) -> tuple[Tokens, Ints]:
    """Return the tokens of some rows, and the place of each of their selections."""
    count = len(rows.layer)
    filled = np.append(rows.starts[1:], count) > rows.starts
    starts, request, phase = rows.starts[filled], rows.request[filled], rows.phase[filled]
    if rows.token is None:
        tokens = Tokens(request, phase, np.append(starts, count), rows.layer, rows.expert)
        return tokens, rows.place
    call = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, count)))
    layer, expert, token, place = rows.layer, rows.expert, rows.token, rows.place
    if np.any((token[1:] < token[:-1]) & (call[1:] == call[:-1])):
        order = np.lexsort((token, call))  # stable: the layers of a token stay in their order
        layer, expert, token, place = layer[order], expert[order], token[order], place[order]
    starts = np.flatnonzero(changes(token, call))
    of_token = call[starts]
    columns = (np.append(starts, count), layer, expert)
    return Tokens(request[of_token], phase[of_token], *columns), place
