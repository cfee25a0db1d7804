"""What routers chose, call by call of the model, for who records it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.pager.client import Choice, Client
from moepack.shape import ModelShape

Layers = dict[int, NDArray[np.uint16]]
"""By layer, what each token of a call chose [tokens, experts used].

In the last layer llama.cpp computes only tokens whose output is asked for: of a prompt the last."""


class Call(NamedTuple):
    """A call of the model by one context, when `request_count` requests had begun."""

    request_count: int
    layers: Layers


class ChoiceRecord:
    """Keeps what the contexts of all programs choose of a model with `shape`.

    What the model cannot have chosen, as another one in the program, is left out.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._expert_counts = shape.expert_counts
        self._most_used = shape.experts_used
        self._open: dict[tuple[Client, int], Call] = {}
        self._ended: list[Call] = []
        self.request_count = 0

    def add(self, client: Client, context: int, choice: Choice) -> None:
        """Take a choice of a context, each call of which has one for each layer, in their order."""
        count = len(choice.experts)
        if not count or not choice.token_count or count % choice.token_count:
            return
        rows = np.array(choice.experts, np.int64).reshape(choice.token_count, -1)
        if not self._is_possible(choice.layer, rows):
            return
        call = self._open.get((client, context))
        if call is None or self._begins(call.layers, choice.layer, rows):
            if call is not None:
                self._ended.append(call)
            call = self._open[client, context] = Call(self.request_count, {})
        call.layers.setdefault(choice.layer, rows.astype(np.uint16))

    def _is_possible(self, layer: int, rows: NDArray[np.int64]) -> bool:
        count, used = self._expert_counts.get(layer, 0), rows.shape[1]
        if rows.max() >= count:
            return False
        is_distinct = bool(np.diff(np.sort(rows, axis=1), axis=1).all())
        return is_distinct and (self._most_used is None or used <= self._most_used)

    def _begins(self, layers: Layers, layer: int, rows: NDArray[np.int64]) -> bool:
        """Return whether a choice is of another call than those that came last of its context."""
        last = next(reversed(layers))
        if layer != last:
            return layer < last
        # Grovemoe lets a router choose once more, the same, for the experts that others share. But
        # of two layers the last may be left out: then the first one's choice is another call's.
        is_again = np.array_equal(rows, layers[layer][:, : rows.shape[1]])
        return len(self._expert_counts) <= 2 or not is_again

    def end(self, client: Client) -> None:
        """Take that a process has ended, and with it the calls of its contexts."""
        for source in [one for one in self._open if one[0] is client]:
            self._ended.append(self._open.pop(source))

    def take(self, *, with_open: bool) -> list[Call]:
        """Return the calls that have ended, with those that may not have, and keep them no more."""
        calls, self._ended = self._ended, []
        if with_open:
            calls += self._open.values()
            self._open.clear()
        return calls
