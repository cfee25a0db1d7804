"""Reuse: the number of tokens until an expert is used again in its layer.

Prefill is left out, as in the working set.
"""

from dataclasses import dataclass

import numpy as np

from moepack.traces.expert_places import ExpertPlaces, padded, values_before
from moepack.traces.model import Item
from moepack.traces.steps import Steps, StepStream

MOST_TOKENS = 1 << 12
"""Limit of tokens, the first of a trace: enough for shares."""
_NEVER = -1
_POWERS = 64


@dataclass(frozen=True, slots=True)
class DistanceCount:
    """The number of selections that recur after `from_` to `to` tokens; None: the first ones."""

    from_: int | None
    to: int | None
    count: int


@dataclass(frozen=True, slots=True)
class LayerReuse:
    """The reuse in one layer; None if the trace is too short."""

    layer: int
    repeat_share: float | None
    median_distance: int | None


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """The reuse in all layers: shares are of selections, distances are tokens."""

    token_count: int
    repeat_share: float | None
    median_distance: int | None
    distances: tuple[DistanceCount, ...]
    layers: tuple[LayerReuse, ...]


class Reuse:
    """Measures tokens as they come; distances go on over requests, repetition does not."""

    def __init__(self) -> None:
        self.steps = StepStream(most_tokens=MOST_TOKENS)
        self._places = ExpertPlaces()
        self._last = np.zeros(0, np.int64)
        """By place, the token that used the expert last."""
        self._first_count = 0
        # By layer, in the order of `ExpertPlaces.rows`.
        self._distances = np.zeros((0, _POWERS), np.int64)
        self._repeated = self._repeatable = np.zeros(0, np.int64)

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        first_token = self.steps.token_count
        steps = self.steps.add(item)
        if steps is not None and len(steps.layer):
            self._add_steps(steps, first_token)

    def facts(self) -> ReuseFacts:
        """Return the reuse so far."""
        layers = sorted((layer, row) for row, layer in enumerate(self._places.layers))
        has_reuse = self._distances.sum(axis=1) > 0
        return ReuseFacts(
            self.steps.token_count,
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
        """Return the share of selections of an expert that the token before used too."""
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
        places = self._places.index_of(steps.layer, steps.expert)
        self._last = padded(self._last, self._places.count, _NEVER)
        before = values_before(token, places, self._last)
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
