"""Lookups: the experts that each step of a trace needs from a cache, in order.

A call of the model computes layer after layer, all its tokens at once: each layer is a step, which
looks up each expert it is routed to once, in the order of their last routing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from moepack.traces.expert_places import ExpertPlaces
from moepack.traces.model import MAX_NUMBER, Counts, Ints, Item, Origin, Phase, Unknown, changes
from moepack.traces.steps import ALL_PHASES, Steps, StepStream, Truths

_GROUP_COUNT = 1 << 17
"""Lookups that are passed on at once: with fewer, the cost of each group weighs more."""


class Lookups(NamedTuple):
    """Lookups of whole steps, in their order.

    `step` [lookups] numbers the steps of a trace, `call` their calls; neither ever falls. `layer`
    and `place` are the expert's: places are below the `count` of the ExpertPlaces that gave them.
    `is_decode` says whether the call computed one token, or may have, if the trace does not tell
    phases.
    """

    call: Ints
    step: Ints
    layer: Ints
    place: Ints
    is_decode: Truths

    @property
    def lookup_count(self) -> int:
        """How many lookups there are."""
        return len(self.step)

    @property
    def step_starts(self) -> Ints:
        """The index at which each step begins."""
        return np.flatnonzero(np.diff(self.step, prepend=-1))

    def part(self, rows: Truths | Ints | slice) -> "Lookups":
        """Return some of the lookups."""
        return Lookups._make(column[rows] for column in self)


class LookupStream:
    """Turns the pieces of a trace, as they come, into lookups, passed on to `on_lookups`.

    Layers that are not in `layers` are left out; None means all. A prompt is computed in batches of
    `batch_count` tokens; by default it is one call. `steps` counts tokens and requests. Memory is
    bounded by the number of experts and the length of a piece.
    """

    def __init__(
        self,
        on_lookups: Callable[[Lookups], None],
        layers: Collection[int] | None,
        batch_count: int | None = None,
    ) -> None:
        self._on_lookups = on_lookups
        self._layers = None if layers is None else np.array(sorted(layers), np.int64)
        self._batch_count = batch_count
        self.steps = StepStream(ALL_PHASES)
        self.places = ExpertPlaces()
        self._call_count = 0
        self._step_count = 0
        self._token_in_call = 0
        self._open: Lookups | None = None
        """The lookups of a call that may continue in the next piece."""
        self._waiting: list[Lookups] = []
        self._waiting_count = 0
        self.decode_token_count = 0
        self.unknown: set[Unknown] = set()
        """Facts that the trace does not tell."""
        self.left_out: Counter[str] = Counter()
        """Counts of selections that were no lookups, by reason."""
        self._used = np.zeros(MAX_NUMBER + 1, np.int64)

    def used(self, layer: int) -> int:
        """Return how many experts a decoded token used in a layer at most; 0 for none."""
        return int(self._used[layer])

    def add(self, item: Item) -> None:
        """Add the next piece of a trace."""
        if isinstance(item, Origin):
            self.unknown |= item.unknown
        if isinstance(item, Counts):
            self.left_out["counts without tokens"] += int(item.counts.sum())
        steps = self.steps.add(item)
        if steps is not None:
            self._add(steps)

    def end(self) -> None:
        """Pass on the rest at the end of the trace."""
        if self._open is not None:
            self._keep(self._open)
        self._open = None
        self._flush()

    def _add(self, steps: Steps) -> None:
        call = self._calls(steps)
        is_decode = steps.phase != Phase.PREFILL
        self.decode_token_count += int(np.count_nonzero(is_decode))
        lookups = Lookups(
            steps.of_selections(call),
            np.zeros(len(steps.layer), np.int64),
            steps.layer.astype(np.int64),
            self.places.index_of(steps.layer, steps.expert),
            steps.of_selections(is_decode),
        )
        if self._open is not None:
            lookups = _joined([self._open, lookups])
        lookups = self._without_others(lookups)
        if not lookups.lookup_count:
            return
        lookups = _distinct(lookups)
        is_open = (lookups.call == call[-1]) & ~is_decode[-1]
        self._open = lookups.part(is_open) if is_open.any() else None
        self._keep(lookups.part(~is_open))

    def _without_others(self, lookups: Lookups) -> Lookups:
        """Return the lookups of `layers`; count the others."""
        if self._layers is None or np.all(is_listed := np.isin(lookups.layer, self._layers)):
            return lookups
        other_count = int(np.count_nonzero(~is_listed))
        self.left_out["of layers for multi-token prediction"] += other_count
        return lookups.part(is_listed)

    def _calls(self, steps: Steps) -> Ints:
        """Return the call of each token, by its number."""
        begins = steps.begins_step.copy()
        if self._batch_count is not None:
            tokens = np.arange(len(begins))
            first = np.maximum.accumulate(np.where(begins, tokens, -self._token_in_call))
            begins = (tokens - first) % self._batch_count == 0
            self._token_in_call = int(len(begins) - first[-1])
        call = self._call_count - 1 + np.cumsum(begins)
        self._call_count = int(call[-1]) + 1
        return call

    def _keep(self, lookups: Lookups) -> None:
        self._waiting.append(lookups)
        self._waiting_count += lookups.lookup_count
        if self._waiting_count >= _GROUP_COUNT:
            self._flush()

    def _flush(self) -> None:
        if self._waiting_count:
            lookups = _joined(self._waiting)
            lookups = lookups._replace(step=_steps_of(lookups, self._step_count))
            self._step_count = int(lookups.step[-1]) + 1
            decoded = lookups.part(lookups.is_decode)
            starts = decoded.step_starts
            used = np.diff(np.append(starts, decoded.lookup_count))
            np.maximum.at(self._used, decoded.layer[starts], used)
            self._on_lookups(lookups)
        self._waiting, self._waiting_count = [], 0


def _joined(parts: Sequence[Lookups]) -> Lookups:
    """Concatenate lookups."""
    return Lookups._make(map(np.concatenate, zip(*parts, strict=True)))


def _steps_of(lookups: Lookups, first: int) -> Ints:
    """Return the step of each lookup, numbered from `first`: each layer of a call is one."""
    steps: Ints = first - 1 + np.cumsum(changes(lookups.call, lookups.layer))
    return steps


def _distinct(lookups: Lookups) -> Lookups:
    """Order lookups by step, and keep the last of each expert there."""
    order = np.lexsort((lookups.layer, lookups.call))  # it is stable
    lookups = lookups.part(order)
    keys = lookups.call * (int(lookups.place.max()) + 1) + lookups.place
    _, from_end = np.unique(keys[::-1], return_index=True)
    return lookups.part(np.sort(len(keys) - 1 - from_end))
