"""Reuse: after how many tokens an expert is chosen again in its layer.

Prefill is left out, as in the working set.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.trace.model import Counts, Ints, Item, Origin, Phase, Shorts, Tokens

Truths = NDArray[np.bool_]
MOST_TOKENS = 1 << 12
"""Of a longer trace the first so many are looked at, which is enough for shares."""
_NEVER = -1
_POWERS = 64


class Reuse:
    """Looks at the tokens as they come by; distances go on over requests, repetition does not."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self.token_count = 0
        self._width = 1
        self._last = np.zeros(0, np.int64)
        self._distances = np.zeros((0, _POWERS), np.int64)
        self._first_count = 0
        self._repeated = np.zeros(0, np.int64)
        self._repeatable = np.zeros(0, np.int64)
        self._request: tuple[int, int] | None = None
        self._origin = 0

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, Origin):
            self._origin += 1
        elif not isinstance(item, Counts) and self.token_count < self._most:
            self._add_tokens(item)

    def layers(self) -> list[int]:
        """List the layers in which any expert was chosen again."""
        return [int(layer) for layer in np.flatnonzero(self._distances.sum(axis=1))]

    def repeat_share(self, layer: int | None = None) -> float | None:
        """Give the share of selections whose expert the token before had chosen, in its request."""
        rows = slice(None) if layer is None else slice(layer, layer + 1)
        repeatable = int(self._repeatable[rows].sum())
        return int(self._repeated[rows].sum()) / repeatable if repeatable else None

    def distances(self) -> list[dict[str, Any]]:
        """Give how many selections come again after so many tokens: 1, 2, 3-4, 5-8 and so on.

        The last is those that come for the first time.
        """
        by_power = self._distances.sum(axis=0)
        last = int(np.max(np.flatnonzero(by_power), initial=-1))
        found: list[dict[str, Any]] = []
        for power in range(last + 1):
            low = 1 if not power else (1 << power - 1) + 1
            found.append({"from": low, "to": 1 << power, "count": int(by_power[power])})
        return [*found, {"from": None, "to": None, "count": self._first_count}]

    def median_distance(self, layer: int | None = None) -> int | None:
        """Give the tokens within which half of all reuses come, rounded up to a power of two."""
        rows = slice(None) if layer is None else slice(layer, layer + 1)
        by_power = self._distances[rows].sum(axis=0)
        total = int(by_power.sum())
        return 1 << int(np.searchsorted(np.cumsum(by_power), total / 2)) if total else None

    def to_json(self) -> dict[str, Any]:
        """Give this as JSON values."""
        return {
            "token_count": self.token_count,
            "repeat_share": self.repeat_share(),
            "median_distance": self.median_distance(),
            "distances": self.distances(),
            "layers": [
                {
                    "layer": layer,
                    "repeat_share": self.repeat_share(layer),
                    "median_distance": self.median_distance(layer),
                }
                for layer in self.layers()
            ],
        }

    def _add_tokens(self, tokens: Tokens) -> None:
        wanted = tokens.phase != Phase.PREFILL
        wanted &= np.cumsum(wanted) <= self._most - self.token_count
        lengths = np.diff(tokens.starts)
        chosen = np.repeat(wanted, lengths)
        layer, expert = tokens.layer[chosen], tokens.expert[chosen]
        if not len(layer):
            return
        self._grow(int(layer.max()) + 1, int(expert.max()) + 1)
        count = int(np.count_nonzero(wanted))
        token = np.repeat(np.arange(count) + self.token_count, lengths[wanted])
        goes_on = np.repeat(self._going_on(tokens.request[wanted]), lengths[wanted])
        keys = layer * np.int64(self._width) + expert
        before = self._before(keys, token)
        self._count(layer, token, before, goes_on)
        self.token_count += count

    def _before(self, keys: Ints, token: Ints) -> Ints:
        """Give the token that chose each expert before; remember the last for the next piece."""
        narrow = keys.astype(np.uint16) if len(self._last) <= 1 << 16 else keys
        order = np.argsort(narrow, kind="stable")  # by counting, where there are 16 bits
        ordered, when = keys[order], token[order]
        is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        before = np.empty(len(keys), np.int64)
        before[order[1:]] = when[:-1]
        firsts = ordered[is_first]
        before[order[is_first]] = self._last[firsts]
        self._last[firsts] = when[np.append(is_first[1:], True)]
        return before

    def _count(self, layer: Shorts, token: Ints, before: Ints, goes_on: Truths) -> None:
        height = len(self._repeated)
        self._repeatable += np.bincount(layer[goes_on], minlength=height)
        self._repeated += np.bincount(layer[goes_on & (before == token - 1)], minlength=height)
        self._first_count += int(np.count_nonzero(before == _NEVER))
        again = (before != _NEVER) & (before < token)
        power = np.frexp((token[again] - before[again] - 1).astype(np.float64))[1]
        cells = layer[again] * np.int64(_POWERS) + power
        self._distances += np.bincount(cells, minlength=height * _POWERS).reshape(height, _POWERS)

    def _going_on(self, request: Ints) -> Truths:
        """Say which tokens have one before them in their request."""
        same = np.ones(len(request), np.bool_)
        same[1:] = request[1:] == request[:-1]
        same[0] = self._request == (self._origin, int(request[0]))
        self._request = self._origin, int(request[-1])
        return same

    def _grow(self, layers: int, experts: int) -> None:
        height, width = max(layers, len(self._repeated)), max(experts, self._width)
        if height * width == len(self._last) and width == self._width:
            return
        last = np.full((height, width), _NEVER, np.int64)
        old = self._last.reshape(-1, self._width)
        last[: old.shape[0], : old.shape[1]] = old
        more = height - len(self._repeated)
        self._last, self._width = last.ravel(), width
        self._distances = np.pad(self._distances, ((0, more), (0, 0)))
        self._repeated = np.pad(self._repeated, (0, more))
        self._repeatable = np.pad(self._repeatable, (0, more))
