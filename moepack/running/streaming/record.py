"""Routed experts, call by call of the model, for a recording."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.shape import ModelShape
from moepack.running.streaming.control import Selection

Layers = dict[int, NDArray[np.uint16]]
"""By layer, the experts of each token of a call [tokens, experts used].

In the last layer llama.cpp computes only tokens whose output is asked for: of a prompt the last."""


class Call(NamedTuple):
    """A call of the model by one context, when `request_count` requests had begun."""

    request_count: int
    layers: Layers


class RoutingRecord:
    """The selections of all contexts of all programs, for a model with `shape`.

    Impossible selections, as of another model in the program, are left out.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._expert_counts = shape.expert_counts
        self._most_used = shape.experts_used
        self._open: dict[tuple[int, int], Call] = {}
        self._ended: list[Call] = []
        self.request_count = 0

    def add(self, source: tuple[int, int], selection: Selection) -> None:
        """Add a selection of a process and context: a call has one for each layer, in order."""
        count = len(selection.experts)
        if not count or not selection.token_count or count % selection.token_count:
            return
        rows = np.array(selection.experts, np.int64).reshape(selection.token_count, -1)
        if not self._is_possible(selection.layer, rows):
            return
        call = self._open.get(source)
        if call is None or self._begins(call.layers, selection.layer, rows):
            if call is not None:
                self._ended.append(call)
            call = self._open[source] = Call(self.request_count, {})
        call.layers.setdefault(selection.layer, rows.astype(np.uint16))

    def _is_possible(self, layer: int, rows: NDArray[np.int64]) -> bool:
        if rows.max() >= self._expert_counts.get(layer, 0):
            return False
        is_distinct = bool(np.diff(np.sort(rows, axis=1), axis=1).all())
        return is_distinct and (self._most_used is None or rows.shape[1] <= self._most_used)

    def _begins(self, layers: Layers, layer: int, rows: NDArray[np.int64]) -> bool:
        """Return whether a selection begins another call than the last one of its context."""
        last = next(reversed(layers))
        if layer != last:
            return layer < last
        # Grovemoe's router selects once more, the same, for the experts that others share. But
        # of two layers the last may be left out: then the first one's selection is another call's.
        is_again = np.array_equal(rows, layers[layer][:, : rows.shape[1]])
        return len(self._expert_counts) <= 2 or not is_again

    def end(self, process: int) -> None:
        """End the calls of all contexts of a process."""
        for source in [one for one in self._open if one[0] == process]:
            self._ended.append(self._open.pop(source))

    def pop(self, *, with_open: bool) -> list[Call]:
        """Remove and return the calls that have ended, `with_open` also the others."""
        calls, self._ended = self._ended, []
        if with_open:
            calls += self._open.values()
            self._open.clear()
        return calls
