"""How strictly a trace is taken: against a model's shape, and what becomes of bad lines."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.errors import TraceError
from moepack.shape import ModelShape
from moepack.trace.model import MAX_NUMBER, Counts, Ints, Phase, Shorts

_ANOTHER_MODEL = "was it taken on another model?"


class Checks:
    """Checks one file. `shape` is the model's; None takes any layer and expert up to 65535.

    A fault raises TraceError; where `lenient`, what is wrong is left out and counted in `warnings`,
    by problem.
    """

    def __init__(self, path: str, shape: ModelShape | None = None, lenient: bool = False) -> None:
        self.path = path
        self.shape = shape
        self.lenient = lenient
        self.warnings: Counter[str] = Counter()
        self._limits = np.full(MAX_NUMBER + 1, MAX_NUMBER + 1 if shape is None else 0, np.int64)
        self.expert_counts = {} if shape is None else shape.expert_counts
        for layer, count in self.expert_counts.items():
            self._limits[layer] = count

    def fault(self, problem: str, place: str | None, count: int = 1, **details: Any) -> None:
        """Raise TraceError, or count `count` items as left out."""
        if not self.lenient:
            raise TraceError(problem, path=self.path, place=place, **details)
        self.warnings[problem] += count

    def warn(self, problem: str, count: int) -> None:
        """Count items that are left out, and why, however strict this is."""
        if count:
            self.warnings[problem] += count

    def expect_shape(self, layer_count: int | None, expert_count: int | None) -> None:
        """Compare what a file says of its model with the shape; raise TraceError at once."""
        if self.shape is None:
            return
        counts = self.expert_counts
        most, last = max(counts.values(), default=0), max(counts, default=-1)
        if expert_count is not None and expert_count != most:
            raise self._another_model("experts a layer", most, expert_count)
        if layer_count is not None and layer_count < len(counts):
            raise self._another_model("layers", f"up to layer {last}", layer_count)

    def _another_model(self, what: str, expected: object, found: object) -> TraceError:
        problem = f"the file is of a model with other {what}"
        return TraceError(
            problem, path=self.path, expected=expected, found=found, hint=_ANOTHER_MODEL
        )

    def fitting(
        self, layer: Ints, expert: Ints, place_of: Callable[[int], str]
    ) -> NDArray[np.bool_] | None:
        """Say which selections the model can have made; None where all can.

        `place_of` names the place of a selection for a message, by its index.
        """
        if self.shape is None and _are_shorts(layer) and _are_shorts(expert):
            return None
        wrong = (layer < 0) | (layer > MAX_NUMBER)
        wrong |= (expert < 0) | (expert >= self._limits[np.where(wrong, 0, layer)])
        if not wrong.any():
            return None
        first = int(np.argmax(wrong))
        selection = f"layer {layer[first]} expert {expert[first]}"
        if self.shape is None:
            problem, hint = "out of bounds", None
            expected = f"layers and experts from 0 to {MAX_NUMBER}"
        else:
            problem, hint = "the model has no such expert", _ANOTHER_MODEL
            expected = str(self.shape)
        place, count = place_of(first), int(np.count_nonzero(wrong))
        self.fault(problem, place, count, expected=expected, found=selection, hint=hint)
        right: NDArray[np.bool_] = ~wrong
        return right

    def counts(
        self, phase: Phase, layer: Ints, expert: Ints, counts: Ints, place_of: Callable[[int], str]
    ) -> Counts:
        """Return those of some counts that the model can have; see `fitting`."""
        right = self.fitting(layer, expert, place_of)
        if right is not None:
            layer, expert, counts = layer[right], expert[right], counts[right]
        return Counts(phase, shorts(layer), shorts(expert), counts)


def _are_shorts(numbers: Ints) -> bool:
    return int(numbers.min(initial=0)) >= 0 and int(numbers.max(initial=0)) <= MAX_NUMBER


def shorts(numbers: Ints) -> Shorts:
    """Narrow layers or experts that were checked."""
    return numbers.astype(np.uint16)
