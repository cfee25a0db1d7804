"""Put selections together to tokens, across the pieces in which they come.

A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
written layer by layer hold a call's tokens side by side; here they are put one after another.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moepack.errors import TraceError
from moepack.trace.model import Bytes, Ints, Shorts, Tokens

MAX_CALL_SELECTIONS = 1 << 23


class Rows(NamedTuple):
    """Selections in the order of a file; calls begin at the indices `starts`, which rise.

    What comes before the first start belongs to the call before. `request` and `phase` have an item
    for each start. `token` numbers the tokens of a call; without it each call is one token.
    """

    starts: Ints
    request: Ints
    phase: Bytes
    layer: Shorts
    expert: Shorts
    token: Ints | None = None


class Assembler:
    """Takes rows and gives whole tokens; the last call is held back until the next one begins."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: list[Rows] = []
        self._held_count = 0

    def add(self, rows: Rows) -> Iterator[Tokens]:
        """Take more rows; yield the tokens that are complete by now."""
        if len(rows.starts):
            last = int(rows.starts[-1])
            self._hold(_part(rows, slice(None, last), slice(None, -1)))
            yield from self.end()
            rows = _part(rows, slice(last, None), slice(-1, None))
        self._hold(rows)

    def end(self) -> Iterator[Tokens]:
        """Yield what was held back."""
        held, self._held = self._held, []
        self._held_count = 0
        if held and any(len(rows.layer) for rows in held):
            yield _to_tokens(_join(held))

    def _hold(self, rows: Rows) -> None:
        self._held.append(rows)
        self._held_count += len(rows.layer)
        if self._held_count > MAX_CALL_SELECTIONS:
            problem = "one call, or token, with too many selections"
            expected = f"<= {MAX_CALL_SELECTIONS}"
            raise TraceError(problem, path=self._path, expected=expected)


def _part(rows: Rows, selections: slice, calls: slice) -> Rows:
    """Return some of the rows, and those calls that begin among them."""
    return Rows(
        rows.starts[calls] - (selections.start or 0),
        rows.request[calls],
        rows.phase[calls],
        rows.layer[selections],
        rows.expert[selections],
        None if rows.token is None else rows.token[selections],
    )


def _join(held: list[Rows]) -> Rows:
    if len(held) == 1:
        return held[0]
    lengths = np.cumsum([0, *(len(rows.layer) for rows in held)])
    pairs = zip(held, lengths, strict=False)
    tokens = [rows.token for rows in held if rows.token is not None]
    return Rows(
        np.concatenate([rows.starts + before for rows, before in pairs]),
        np.concatenate([rows.request for rows in held]),
        np.concatenate([rows.phase for rows in held]),
        np.concatenate([rows.layer for rows in held]),
        np.concatenate([rows.expert for rows in held]),
        np.concatenate(tokens) if tokens else None,
    )


def _to_tokens(rows: Rows) -> Tokens:
    count = len(rows.layer)
    filled = np.append(rows.starts[1:], count) > rows.starts
    starts, request, phase = rows.starts[filled], rows.request[filled], rows.phase[filled]
    if rows.token is None:
        return Tokens(request, phase, np.append(starts, count), rows.layer, rows.expert)
    call = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, count)))
    layer, expert, token = rows.layer, rows.expert, rows.token
    if np.any((token[1:] < token[:-1]) & (call[1:] == call[:-1])):
        order = np.lexsort((token, call))  # stable: the layers of a token stay in their order
        layer, expert, token = layer[order], expert[order], token[order]
    begins = np.ones(count, np.bool_)
    begins[1:] = (token[1:] != token[:-1]) | (call[1:] != call[:-1])
    starts = np.flatnonzero(begins)
    return Tokens(
        request[call[starts]], phase[call[starts]], np.append(starts, count), layer, expert
    )
