"""How strictly a trace is taken: against a model's shape, and what becomes of bad lines."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.errors import TraceError
from moepack.shape import ModelShape
from moepack.trace.model import (
    MAX_NUMBER,
    Counts,
    Dimensions,
    Ints,
    Origin,
    Phase,
    Shorts,
    Tokens,
    selected,
)

_ANOTHER_MODEL = "was it taken on another model?"
_FEW = 32
"""Experts in one layer of a token: more are looked at in another way."""
_ANY = f"layers and experts from 0 to {MAX_NUMBER}"


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
        self.stated: Dimensions | None = None
        """What the file said of its model so far."""
        self._layer_bound = self._expert_bound = MAX_NUMBER + 1
        self.expert_counts = {} if shape is None else shape.expert_counts
        self._shape_limits = None if shape is None else _limits(self.expert_counts)
        self._limits = self._shape_limits
        """By layer, the bound of its experts; None where no model is known."""

    def fault(self, problem: str, place: str | None, count: int = 1, **details: Any) -> None:
        """Raise TraceError, or count `count` items as left out."""
        if not self.lenient:
            raise TraceError(problem, path=self.path, place=place, **details)
        self.warnings[problem] += count

    def warn(self, problem: str, count: int) -> None:
        """Count items that are left out, and why, however strict this is."""
        if count:
            self.warnings[problem] += count

    def state(self, stated: Dimensions, place: str | None) -> None:
        """Take what the file says of its model: all that comes is held against it.

        Raises TraceError at once, however lenient this is, where no model is like that, where the
        file said something else before, and where the shape is another.
        """
        numbers = [number for number in stated if number is not None]
        if not all(1 <= number <= MAX_NUMBER + 1 for number in numbers):
            problem, expected = "dimensions that no model has", f"1 to {MAX_NUMBER + 1}"
            raise TraceError(problem, path=self.path, place=place, expected=expected, found=stated)
        if self.stated is not None and stated != self.stated:
            raise TraceError(
                "the file says that it is of another model than before",
                path=self.path,
                place=place,
                expected=self.stated,
                found=stated,
                hint="only files of one model can be joined",
            )
        self._take(stated)
        self._expect_shape(stated, place)

    def state_origin(self, origin: Origin, place: str) -> None:
        """Take what an origin says of the model that what follows was taken on.

        Raises TraceError at once where the shape is another.
        """
        self._limits = self._shape_limits
        self._take(Dimensions(None, origin.expert_count, origin.experts_used))
        self._expect_shape(Dimensions(expert_count=origin.expert_count), place)
        counts = origin.expert_counts
        if counts is not None:
            self.expect_experts(counts, place)
            self.stated = Dimensions(max(counts) + 1, max(counts.values()), origin.experts_used)
            self._limits = _limits(counts)

    def expect_experts(self, expert_counts: Mapping[int, int], place: str | None) -> None:
        """Hold the experts of layers, all that have any, against the shape.

        Raises TraceError where no model has so many, and where the shape lacks such a layer, or
        has other experts in it.
        """
        for layer, count in expert_counts.items():
            if not 1 <= count <= MAX_NUMBER + 1:
                problem, expected = "experts that no model has", f"1 to {MAX_NUMBER + 1}"
                where = f"layer {layer}"
                raise TraceError(
                    problem, path=self.path, place=where, expected=expected, found=count
                )
            if self.shape is not None and self.expert_counts.get(layer, 0) != count:
                what, right = f"experts in layer {layer}", self.expert_counts.get(layer, 0)
                raise self._another_model(what, place, right, count)

    def _take(self, stated: Dimensions) -> None:
        self.stated = stated
        self._layer_bound = stated.layer_count or MAX_NUMBER + 1
        self._expert_bound = stated.expert_count or MAX_NUMBER + 1

    def _expect_shape(self, stated: Dimensions, place: str | None) -> None:
        """Compare layers and experts; users let engines use fewer experts than the model does."""
        if self.shape is None:
            return
        counts = self.expert_counts
        most, last = max(counts.values(), default=0), max(counts, default=-1)
        if stated.expert_count is not None and stated.expert_count != most:
            raise self._another_model("experts a layer", place, most, stated.expert_count)
        if stated.layer_count is not None and stated.layer_count < len(counts):
            raise self._another_model("layers", place, f"up to layer {last}", stated.layer_count)

    def _another_model(
        self, what: str, place: str | None, expected: object, found: object
    ) -> TraceError:
        problem = f"the file is of a model with other {what}"
        return TraceError(
            problem,
            path=self.path,
            place=place,
            expected=expected,
            found=found,
            hint=_ANOTHER_MODEL,
        )

    def fitting(
        self, layer: Ints, expert: Ints, place_of: Callable[[int], str]
    ) -> NDArray[np.bool_] | None:
        """Say which selections the model can have made; None where all can.

        `place_of` names the place of a selection for a message, by its index.
        """
        if self._limits is None and not (
            _any_beyond(layer, self._layer_bound) or _any_beyond(expert, self._expert_bound)
        ):
            return None
        beyond = (layer < 0) | (layer >= self._layer_bound)
        beyond |= (expert < 0) | (expert >= self._expert_bound)
        wrong = beyond
        if self._limits is not None:
            wrong = beyond | (expert >= self._limits[np.where(beyond, 0, layer)])
        if not wrong.any():
            return None
        first, count = int(np.argmax(wrong)), int(np.count_nonzero(wrong))
        expected: object
        if self.shape is not None and not (beyond[first] and self.stated):
            problem, expected, hint = "the model has no such expert", self.shape, _ANOTHER_MODEL
        elif self.stated is None or max(layer[first], expert[first]) > MAX_NUMBER:
            problem, expected, hint = "out of bounds", _ANY, None
        else:
            problem, expected = "not of the model that the file says it is of", self.stated
            if self._limits is not None and not beyond[first]:
                expected = f"{self._limits[layer[first]]} experts in layer {layer[first]}"
            hint = "is it damaged, or were files of several models joined?"
        found = f"layer {layer[first]} expert {expert[first]}"
        self.fault(problem, place_of(first), count, expected=expected, found=found, hint=hint)
        right: NDArray[np.bool_] = ~wrong
        return right

    def tokens(self, tokens: Tokens, place_of: Callable[[int], str]) -> Tokens:
        """Return whole tokens without what no router chooses.

        A router gives a token's layer each expert once, and no more of them than the file says
        that the model uses.
        """
        used = self.stated.experts_used if self.stated else None
        if _is_plain(tokens, used or MAX_NUMBER + 1):
            return tokens
        keys = np.repeat(np.arange(len(tokens.request)), np.diff(tokens.starts)) << 16
        keys |= tokens.layer
        again = _repeated(keys << 16 | tokens.expert, 1)
        if len(again):
            problem, expected = "an expert twice in one layer of a token", "each expert once"
            hint = "were the borders of tokens lost? `lenient=True` counts such experts once"
            kept = self._without(tokens, again, place_of, problem, expected=expected, hint=hint)
            return self.tokens(kept, place_of)  # lenient: no place will be asked for again
        more = _repeated(keys, used or MAX_NUMBER + 1)
        if len(more):
            problem = "more experts in one layer of a token than the file says"
            return self._without(tokens, more, place_of, problem, expected=f"<= {used}")
        return tokens

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
        found = f"layer {tokens.layer[first]} expert {tokens.expert[first]}"
        place = None if self.lenient else place_of(first)
        self.fault(problem, place, len(wrong), found=found, **details)
        kept = np.ones(len(tokens.layer), np.bool_)
        kept[wrong] = False
        return selected(tokens, kept)

    def counts(
        self, phase: Phase, layer: Ints, expert: Ints, counts: Ints, place_of: Callable[[int], str]
    ) -> Counts:
        """Return those of some counts that the model can have."""
        right = self.fitting(layer, expert, place_of)
        if right is not None:
            layer, expert, counts = layer[right], expert[right], counts[right]
        return Counts(phase, shorts(layer), shorts(expert), counts)


def _limits(expert_counts: Mapping[int, int]) -> Ints:
    """Return by layer how many experts it has, none where no count is given."""
    limits = np.zeros(MAX_NUMBER + 1, np.int64)
    limits[list(expert_counts)] = list(expert_counts.values())
    return limits


def _any_beyond(numbers: Ints, bound: int) -> bool:
    return int(numbers.min(initial=0)) < 0 or int(numbers.max(initial=0)) >= bound


def _is_plain(tokens: Tokens, most: int) -> bool:
    """Say whether the experts of a token's layer stand together, are few, and surely differ.

    That is so nearly always, and is seen twenty times as fast as sorting shows it.
    """
    layer, starts = tokens.layer, tokens.starts
    begins = np.zeros(len(layer) + 1, np.bool_)
    begins[starts] = True
    if np.any((layer[1:] < layer[:-1]) & ~begins[1:-1]):
        return False
    begins[1:-1] |= layer[1:] != layer[:-1]
    longest = int(np.diff(np.flatnonzero(begins)).max(initial=0))
    if longest > min(most, _FEW):
        return False
    pairs = layer.astype(np.uint32) << 16 | tokens.expert
    return not any(np.any(pairs[far:] == pairs[:-far]) for far in range(1, longest))


def _repeated(keys: Ints, most: int) -> NDArray[np.intp]:
    """Return the indices of the keys that stand there `most` times before."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    repeated: NDArray[np.intp] = order[most:][ordered[most:] == ordered[:-most]]
    return repeated


def shorts(numbers: Ints) -> Shorts:
    """Narrow layers or experts that were checked."""
    return numbers.astype(np.uint16)
