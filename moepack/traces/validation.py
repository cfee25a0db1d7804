"""Checks of a trace: against the model's shape and the file's own statements, strict or lenient."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.shape import ModelShape
from moepack.traces.model import (
    MAX_NUMBER,
    Counts,
    Ints,
    Origin,
    Phase,
    Shorts,
    Tokens,
    in_layer_order,
    layers_fall,
    repeated,
    selected,
)

_ANOTHER_MODEL = "was it taken on another model?"
_NO_MODEL = "experts that no model has"
_FEW = 32
"""Experts in one layer of a token: more are compared by sorting."""
_ANY = f"layers and experts from 0 to {MAX_NUMBER}"


class Checks:
    """Checks one file. `shape` is the model's; None allows any layer and expert up to 65535.

    A fault raises TraceError; if `lenient`, it is left out and counted in `warnings`, by problem.
    """

    def __init__(self, path: str, shape: ModelShape | None = None, lenient: bool = False) -> None:
        self.path = path
        self.shape = shape
        self.lenient = lenient
        self.warnings: Counter[str] = Counter()
        self.expert_counts = {} if shape is None else shape.expert_counts
        self._is_stated = False
        """Whether the file states numbers of experts."""
        self._used = MAX_NUMBER + 1
        """The most experts of a layer that a token uses, as the file states."""
        self._shape_limits = np.full(MAX_NUMBER + 1, MAX_NUMBER + 1)
        """By layer, the bound of its experts."""
        if shape is not None:
            self._shape_limits = _limits(self.expert_counts)
        self._limits = self._shape_limits

    def error(
        self,
        problem: str,
        place: str | None = None,
        expected: object = None,
        actual: object = None,
        hint: str | None = None,
    ) -> TraceError:
        """Return an error of the file."""
        return TraceError(
            problem, path=self.path, place=place, expected=expected, found=actual, hint=hint
        )

    def fault(self, problem: str, place: str | None, count: int = 1, **details: Any) -> None:
        """Raise TraceError, or count `count` items as left out."""
        if not self.lenient:
            raise TraceError(problem, path=self.path, place=place, **details)
        self.warnings[problem] += count

    def warn(self, problem: str, count: int) -> None:
        """Count items that are left out, by problem, strict or not."""
        if count:
            self.warnings[problem] += count

    def state_origin(self, origin: Origin, place: str | None) -> None:
        """Check all further selections against the model that an origin states.

        Raises TraceError, lenient or not, if no model is like that, or if the shape differs; users
        let engines use fewer experts than the model does.
        """
        counts, count = origin.expert_counts or {}, origin.expert_count
        self.expect_experts(counts, place)
        most = max(self.expert_counts.values(), default=0)
        if count is not None and not 1 <= count <= MAX_NUMBER + 1:
            raise self.error(_NO_MODEL, place, f"1 to {MAX_NUMBER + 1}", count)
        if count is not None and self.shape is not None and count != most:
            raise self._another_model("experts a layer", place, most, count)
        self._is_stated = bool(counts or count)
        self._used = origin.experts_used or MAX_NUMBER + 1
        limits = _limits(counts) if counts else self._shape_limits
        self._limits = np.minimum(limits, count or MAX_NUMBER + 1)

    def expect_experts(self, expert_counts: Mapping[int, int], place: str | None) -> None:
        """Compare the experts of layers with the shape.

        Raises TraceError if no model has so many, or if the shape lacks such a layer, or has other
        experts in it.
        """
        for layer, count in expert_counts.items():
            if not 1 <= count <= MAX_NUMBER + 1:
                raise self.error(_NO_MODEL, f"layer {layer}", f"1 to {MAX_NUMBER + 1}", count)
            right = self.expert_counts.get(layer, 0)
            if self.shape is not None and right != count:
                raise self._another_model(f"experts in layer {layer}", place, right, count)

    def _another_model(
        self, name: str, place: str | None, expected: object, actual: object
    ) -> TraceError:
        problem = f"the file is of a model with other {name}"
        return self.error(problem, place, expected, actual, _ANOTHER_MODEL)

    def fitting(
        self, layer: Ints, expert: Ints, place_of: Callable[[int], str]
    ) -> NDArray[np.bool_] | slice:
        """Return an index of the selections that the model can have made, a slice if it is all.

        `place_of` names the place of a selection for a message, by its index.
        """
        is_layer = layer <= MAX_NUMBER
        right: NDArray[np.bool_] = is_layer & (expert < self._limits[np.where(is_layer, layer, 0)])
        if right.all():
            return slice(None)
        first, count = int(np.argmin(right)), int(np.count_nonzero(~right))
        pair = f"layer {layer[first]} expert {expert[first]}"
        expected: object
        if self.shape is not None:
            problem, expected, hint = "the model has no such expert", self.shape, _ANOTHER_MODEL
        elif self._is_stated and max(layer[first], expert[first]) <= MAX_NUMBER:
            problem = "not of the model that the file says it is of"
            expected = f"{self._limits[layer[first]]} experts in layer {layer[first]}"
            hint = "is it damaged, or were files of several models joined?"
        else:
            problem, expected, hint = "out of bounds", _ANY, None
        self.fault(problem, place_of(first), count, expected=expected, found=pair, hint=hint)
        return right

    def tokens(self, tokens: Tokens, place_of: Callable[[int], str]) -> Tokens:
        """Return whole tokens in the order of layers, without selections that no router makes.

        A router selects each expert of a layer once for a token, and no more of them than the file
        states.
        """
        if _is_plain(tokens, self._used):
            return tokens
        keys = np.repeat(np.arange(len(tokens.request)), np.diff(tokens.starts)) << 16
        keys |= tokens.layer
        again = repeated(keys << 16 | tokens.expert)
        if len(again):
            problem, expected = "an expert twice in one layer of a token", "each expert once"
            hint = "were the borders of tokens lost? `lenient=True` counts such experts once"
            kept = self._without(tokens, again, place_of, problem, expected=expected, hint=hint)
            return self.tokens(kept, place_of)  # lenient: no place will be asked for again
        more = repeated(keys, self._used)
        if len(more):
            problem = "more experts in one layer of a token than the file says"
            tokens = self._without(tokens, more, place_of, problem, expected=f"<= {self._used}")
        return in_layer_order(tokens)

    def _without(
        self,
        tokens: Tokens,
        wrong: NDArray[np.intp],
        place_of: Callable[[int], str],
        problem: str,
        **details: Any,
    ) -> Tokens:
        """Report the selections `wrong`, and leave them out."""
        first = int(wrong.min())
        pair = f"layer {tokens.layer[first]} expert {tokens.expert[first]}"
        place = None if self.lenient else place_of(first)
        self.fault(problem, place, len(wrong), found=pair, **details)
        kept = np.ones(len(tokens.layer), np.bool_)
        kept[wrong] = False
        return selected(tokens, kept)

    def counts(
        self, phase: Phase, layer: Ints, expert: Ints, counts: Ints, place_of: Callable[[int], str]
    ) -> Counts:
        """Return the counts of experts that the model has."""
        right = self.fitting(layer, expert, place_of)
        return Counts(phase, shorts(layer[right]), shorts(expert[right]), counts[right])


def _limits(expert_counts: Mapping[int, int]) -> Ints:
    """Return the number of experts by layer, 0 if none is given."""
    limits = np.zeros(MAX_NUMBER + 1, np.int64)
    limits[list(expert_counts)] = list(expert_counts.values())
    return limits


def _is_plain(tokens: Tokens, most: int) -> bool:
    """Return whether the experts of each token's layer stand together, are few, and surely differ.

    They nearly always do, and this is twenty times as fast as sorting.
    """
    if layers_fall(tokens):
        return False
    layer = tokens.layer
    begins = np.zeros(len(layer) + 1, np.bool_)
    begins[tokens.starts] = True
    begins[1:-1] |= layer[1:] != layer[:-1]
    longest = int(np.diff(np.flatnonzero(begins)).max(initial=0))
    if longest > min(most, _FEW):
        return False
    pairs = layer.astype(np.uint32) << 16 | tokens.expert
    return not any(np.any(pairs[far:] == pairs[:-far]) for far in range(1, longest))


def shorts(numbers: Ints) -> Shorts:
    """Narrow layers or experts that were checked."""
    return numbers.astype(np.uint16)
