"""What a cache of the latest experts of each layer would have.

A cache of the latest c experts of a layer has an expert if fewer than c others were chosen since it
was (the stack distance, Mattson et al. 1970): so one pass tells of all sizes. Prefill is left out,
as in the working set.
"""

import numpy as np

from moepack.trace.model import Counts, Ints, Item, Origin, Phase, Shorts, Tokens

MOST_TOKENS = 1 << 13
"""Of a longer trace the first so many are looked at: each takes some 0.2 ms."""
_NEVER = -1


class LatestCaches:
    """Follows the selections of each layer, token by token. Caches go on over requests."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self.token_count = 0
        self._clock = 0
        self._last = np.full((0, 0), _NEVER, np.int64)
        self._depths = np.zeros((0, 1), np.int64)
        self._chosen = np.zeros((0, 1), np.int64)

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, (Origin, Counts)) or not len(item.layer):
            return
        if self.token_count < self._most:
            self._grow(int(item.layer.max()) + 1, int(item.expert.max()) + 1)
            self._add_tokens(item)

    def layers(self) -> list[int]:
        """List the layers that were met."""
        return [int(layer) for layer in np.flatnonzero(self._chosen)]

    def hit_share(self, capacity: int, layer: int | None = None) -> float | None:
        """Give the share of selections that caches of `capacity` experts a layer have."""
        rows = slice(None) if layer is None else slice(layer, layer + 1)
        chosen = int(self._chosen[rows].sum())
        return int(self._depths[rows, :capacity].sum()) / chosen if chosen else None

    def _add_tokens(self, tokens: Tokens) -> None:
        for number in np.flatnonzero(tokens.phase != Phase.PREFILL).tolist():
            if self.token_count >= self._most:
                return
            chosen = slice(int(tokens.starts[number]), int(tokens.starts[number + 1]))
            layer, expert = tokens.layer[chosen], tokens.expert[chosen]
            for one in _one_a_layer(layer):
                self._touch(layer[one], expert[one])
            self.token_count += 1

    def _touch(self, layer: Shorts, expert: Shorts) -> None:
        """Move one expert of each of several layers to the front of its cache."""
        before = self._last[layer, expert]
        depth = np.count_nonzero(self._last[layer] > before[:, None], axis=1)
        is_known = before != _NEVER
        self._depths[layer[is_known], depth[is_known]] += 1
        self._chosen[layer, 0] += 1
        self._last[layer, expert] = self._clock
        self._clock += 1

    def _grow(self, layers: int, experts: int) -> None:
        height, width = max(layers, self._last.shape[0]), max(experts, self._last.shape[1])
        if (height, width) != self._last.shape:
            self._last = _grown(self._last, height, width, _NEVER)
            self._depths = _grown(self._depths, height, width, 0)
            self._chosen = _grown(self._chosen, height, 1, 0)


def _one_a_layer(layer: Shorts) -> list[Ints]:
    """Divide a token's selections: first the first of each layer, then the second of each."""
    order = np.argsort(layer, kind="stable")
    begins = np.flatnonzero(np.diff(layer[order].astype(np.int64), prepend=-1))
    place = np.arange(len(layer)) - np.repeat(begins, np.diff(np.append(begins, len(layer))))
    return [order[place == number] for number in range(int(place.max()) + 1)]


def _grown(table: Ints, height: int, width: int, fill: int) -> Ints:
    larger = np.full((height, width), fill, np.int64)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
