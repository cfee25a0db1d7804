"""Put selections together to tokens, across the pieces in which they come.

A *call* is what a model computes at once: one token in decode, many in prefill. Files that are
written layer by layer hold a call's tokens side by side; here they are put one after another.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moepack.errors import TraceError
from moepack.trace.model import Bytes, Ints, Shorts, Tokens
from moepack.trace.validation import Checks

MAX_CALL_SELECTIONS = 1 << 23


class Rows(NamedTuple):
    """Selections in the order of a file; calls begin at the indices `starts`, which rise.

    What comes before the first start belongs to the call before. `request` and `phase` have an item
    for each start. `token` numbers the tokens of a call; without it each call is one token. `place`
    is where each selection stands: a line, or a byte.
    """

    starts: Ints
    request: Ints
    phase: Bytes
    layer: Shorts
    expert: Shorts
    place: Ints
    token: Ints | None = None


class Assembler:
    """Takes rows and gives whole tokens; the last call is held back until the next one begins.

    Tokens are checked. `unit` is what places are counted in, for messages.
    """

    def __init__(self, checks: Checks, unit: str = "line") -> None:
        self._checks = checks
        self._unit = unit
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
            tokens, place = _to_tokens(_join(held))
            yield self._checks.tokens(tokens, lambda index: f"{self._unit} {place[index]}")

    def _hold(self, rows: Rows) -> None:
        self._held.append(rows)
        self._held_count += len(rows.layer)
        if self._held_count > MAX_CALL_SELECTIONS:
            problem = "one call, or token, with too many selections"
            expected = f"<= {MAX_CALL_SELECTIONS}"
            raise TraceError(problem, path=self._checks.path, expected=expected)


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
        np.concatenate([rows.place for rows in held]),
        np.concatenate(tokens) if tokens else None,
    )


def _to_tokens(rows: Rows) -> tuple[Tokens, Ints]:
    """Give the tokens of some rows, and the place of each of their selections."""
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
    begins = np.ones(count, np.bool_)
    begins[1:] = (token[1:] != token[:-1]) | (call[1:] != call[:-1])
    starts = np.flatnonzero(begins)
    of_token = call[starts]
    columns = (np.append(starts, count), layer, expert)
    return Tokens(request[of_token], phase[of_token], *columns), place
