"""Reuse: after how many tokens an expert is chosen again in its layer.

Prefill is left out, as in the working set.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moepack.trace.expert_places import ExpertPlaces, padded
from moepack.trace.model import Ints, Item
from moepack.trace.steps import Steps, StepStream

Truths = NDArray[np.bool_]
MOST_TOKENS = 1 << 12
"""Of a longer trace the first so many are looked at, which is enough for shares."""
_NEVER = -1
_POWERS = 64


@dataclass(frozen=True, slots=True)
class DistanceCount:
    """How many selections come again after `from_` to `to` tokens; None: for the first time."""

    from_: int | None
    to: int | None
    count: int


@dataclass(frozen=True, slots=True)
class LayerReuse:
    """The reuse in one layer; what a short trace cannot say is None."""

    layer: int
    repeat_share: float | None
    median_distance: int | None


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """What was found: shares are of selections, distances are tokens."""

    token_count: int
    repeat_share: float | None
    median_distance: int | None
    distances: tuple[DistanceCount, ...]
    layers: tuple[LayerReuse, ...]


class Reuse:
    """Looks at the tokens as they come by; distances go on over requests, repetition does not."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._steps = StepStream(most_tokens=most_tokens)
        self._places = ExpertPlaces()
        self._last = np.zeros(0, np.int64)
        """By place, the token that chose the expert last."""
        self._first_count = 0
        # By layer, in the order of `ExpertPlaces.rows`.
        self._distances = np.zeros((0, _POWERS), np.int64)
        self._repeated = self._repeatable = np.zeros(0, np.int64)

    @property
    def token_count(self) -> int:
        """How many tokens were looked at."""
        return self._steps.token_count

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        first_token = self._steps.token_count
        steps = self._steps.take(item)
        if steps is not None and len(steps.layer):
            self._add_steps(steps, first_token)

    def facts(self) -> ReuseFacts:
        """Return what was found."""
        layers = sorted((layer, row) for row, layer in enumerate(self._places.layers))
        has_reuse = self._distances.sum(axis=1) > 0
        return ReuseFacts(
            self.token_count,
            self._repeat_share(slice(None)),
            self._median_distance(slice(None)),
            self._distance_counts(),
            tuple(
                LayerReuse(layer, self._repeat_share(rows), self._median_distance(rows))
                for layer, row in layers
                if has_reuse[row]
                for rows in [slice(row, row + 1)]
            ),
        )

    def _repeat_share(self, rows: slice) -> float | None:
        """Return the share of selections whose expert the token before chose, in its request."""
        repeatable = int(self._repeatable[rows].sum())
        return int(self._repeated[rows].sum()) / repeatable if repeatable else None

    def _distance_counts(self) -> tuple[DistanceCount, ...]:
        """Count selections that come again after 1 token, 2, 3 to 4, 5 to 8 and so on."""
        by_power = self._distances.sum(axis=0)
        last = int(np.max(np.flatnonzero(by_power), initial=-1))
        counts = [
            DistanceCount((1 << power - 1) + 1 if power else 1, 1 << power, int(by_power[power]))
            for power in range(last + 1)
        ]
        return (*counts, DistanceCount(None, None, self._first_count))

    def _median_distance(self, rows: slice) -> int | None:
        """Return the tokens within which half of all reuses come, rounded up to a power of two."""
        by_power = self._distances[rows].sum(axis=0)
        total = int(by_power.sum())
        return 1 << int(np.searchsorted(np.cumsum(by_power), total / 2)) if total else None

    def _add_steps(self, steps: Steps, first_token: int) -> None:
        token = steps.of_selections(np.arange(steps.token_count) + first_token)
        goes_on = ~steps.of_selections(steps.is_first)
        rows = self._places.rows(steps.layer)
        before = self._chosen_before(self._places.of(steps.layer, steps.expert), token)
        more = len(self._places.layers) - len(self._distances)
        self._distances = np.pad(self._distances, ((0, more), (0, 0)))
        self._repeated, self._repeatable = np.pad(
            [self._repeated, self._repeatable], ((0, 0), (0, more))
        )
        height = len(self._distances)
        self._repeatable += np.bincount(rows[goes_on], minlength=height)
        self._repeated += np.bincount(rows[goes_on & (before == token - 1)], minlength=height)
        self._first_count += int(np.count_nonzero(before == _NEVER))
        again = (before != _NEVER) & (before < token)
        # The exponent of a distance less 1 is the power of two that it is rounded up to.
        power = np.frexp((token[again] - before[again] - 1).astype(np.float64))[1]
        cells = rows[again] * _POWERS + power
        self._distances += np.bincount(cells, minlength=height * _POWERS).reshape(height, _POWERS)

    def _chosen_before(self, places: Ints, token: Ints) -> Ints:
        """Return for each selection the token that chose its expert before it, or `_NEVER`.

        Sorted by expert, and by time within one, the selection before stands next to each.
        Remembers the last of each expert for the next piece.
        """
        self._last = padded(self._last, self._places.count, _NEVER)
        # numpy counts numbers of 16 bits instead of comparing them: five times as fast.
        keys = places.astype(np.uint16) if self._places.count <= 1 << 16 else places
        order = np.argsort(keys, kind="stable")
        ordered, when = places[order], token[order]
        is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        is_last = np.append(is_first[1:], True)
        before_in_order = np.concatenate(([_NEVER], when[:-1]))
        before_in_order[is_first] = self._last[ordered[is_first]]
        self._last[ordered[is_last]] = when[is_last]
        before = np.empty(len(places), np.int64)
        before[order] = before_in_order
        return before
