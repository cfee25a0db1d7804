"""Lookups: what each step of a trace asks a cache of experts for, in order.

A call of the model computes layer after layer, all its tokens at once: each layer is a step, which
looks each expert that it chose up once, in the order of their last choice.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moepack.trace.expert_places import ExpertPlaces
from moepack.trace.model import MAX_NUMBER, Counts, Ints, Item, Origin, Phase, Unknown
from moepack.trace.steps import ALL_PHASES, Steps, StepStream, Truths

_GROUP_COUNT = 1 << 17
"""Lookups that are handed on at once: with fewer, what each group costs weighs more."""


class Lookups(NamedTuple):
    """Lookups of whole steps, in their order.

    `step` [lookups] numbers the steps of a trace, `call` the calls that they are part of, `request`
    the requests; all never fall. `layer` and `place` are the expert's: places are below the `count`
    of the ExpertPlaces that gave them. `chosen_count` is by how many tokens it was chosen;
    `is_decode` says whether the call computed one token, or may have, where the trace does not tell
    phases.
    """

    request: Ints
    call: Ints
    step: Ints
    layer: Ints
    place: Ints
    chosen_count: Ints
    is_decode: Truths

    @property
    def lookup_count(self) -> int:
        """How many lookups there are."""
        return len(self.step)

    @property
    def step_starts(self) -> Ints:
        """Where each step begins."""
        return np.flatnonzero(np.diff(self.step, prepend=-1))

    def divided(self, *columns: Ints | Truths) -> Iterator["Lookups"]:
        """Yield them in parts, a new one wherever one of `columns` changes."""
        changes = np.zeros(max(0, self.lookup_count - 1), np.bool_)
        for column in columns:
            changes |= column[1:] != column[:-1]
        borders = (np.flatnonzero(changes) + 1).tolist()
        for start, end in pairwise([0, *borders, self.lookup_count]):
            yield self.part(slice(start, end))

    def part(self, chosen: Truths | Ints | slice) -> "Lookups":
        """Return some of them."""
        return Lookups._make(column[chosen] for column in self)


class LookupStream:
    """Turns the pieces of a trace, as they come, into lookups; hands many at once to `take`.

    Layers that are not among `layers` are left out; None takes all. A prompt is computed in batches
    of `batch_count` tokens; by default it is one call. Memory is bounded by the number of experts
    and the length of a piece.
    """

    def __init__(
        self,
        take: Callable[[Lookups], None],
        layers: Collection[int] | None,
        batch_count: int | None = None,
    ) -> None:
        self._take = take
        self._layers = None if layers is None else np.array(sorted(layers), np.int64)
        self._batch_count = batch_count
        self._steps = StepStream(ALL_PHASES)
        self.places = ExpertPlaces()
        self._call_count = 0
        self._step_count = 0
        self._token_in_call = 0
        self._open: Lookups | None = None
        """Of a call that may go on in the next piece."""
        self._waiting: list[Lookups] = []
        self._waiting_count = 0
        self.decode_token_count = 0
        self.unknown: set[Unknown] = set()
        """What the trace does not tell."""
        self.left_out: Counter[str] = Counter()
        """How many selections were no lookups, by reason."""
        self._used = np.zeros(MAX_NUMBER + 1, np.int64)

    @property
    def token_count(self) -> int:
        """How many tokens there were."""
        return self._steps.token_count

    @property
    def request_count(self) -> int:
        """How many requests there were."""
        return self._steps.request_count

    def used(self, layer: int) -> int:
        """Return how many experts a decoded token used in a layer, the most of any; 0 for none."""
        return int(self._used[layer])

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        if isinstance(item, Origin):
            self.unknown |= item.unknown
        if isinstance(item, Counts):
            self.left_out["counts without tokens"] += int(item.counts.sum())
        steps = self._steps.take(item)
        if steps is not None:
            self._add(steps)

    def end(self) -> None:
        """Take the end of the trace."""
        if self._open is not None:
            self._keep(self._open)
        self._open = None
        self._hand_on()

    def _add(self, steps: Steps) -> None:
        call = self._calls(steps)
        is_decode = steps.phase != Phase.PREFILL
        self.decode_token_count += int(np.count_nonzero(is_decode))
        found = Lookups(
            steps.of_selections(steps.request),
            steps.of_selections(call),
            np.zeros(len(steps.layer), np.int64),
            steps.layer.astype(np.int64),
            self.places.of(steps.layer, steps.expert),
            np.ones(len(steps.layer), np.int64),
            steps.of_selections(is_decode),
        )
        if self._open is not None:
            found = joined([self._open, found])
        found = self._of_layers(found)
        if not found.lookup_count:
            return
        found = _distinct(found)
        last = int(call[-1])
        is_open = found.call == last
        goes_on = not is_decode[-1]
        self._open = found.part(is_open) if goes_on else None
        self._keep(found.part(~is_open) if goes_on else found)

    def _of_layers(self, lookups: Lookups) -> Lookups:
        if self._layers is None or np.all(is_there := np.isin(lookups.layer, self._layers)):
            return lookups
        missing = int(np.count_nonzero(~is_there))
        self.left_out["of layers for multi-token prediction"] += missing
        return lookups.part(is_there)

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
            self._hand_on()

    def _hand_on(self) -> None:
        if self._waiting_count:
            lookups = joined(self._waiting)
            lookups = lookups._replace(step=steps_of(lookups, self._step_count))
            self._step_count = int(lookups.step[-1]) + 1
            decoded = lookups.part(lookups.is_decode)
            starts = decoded.step_starts
            used = np.diff(np.append(starts, decoded.lookup_count))
            np.maximum.at(self._used, decoded.layer[starts], used)
            self._take(lookups)
        self._waiting, self._waiting_count = [], 0


def joined(parts: Sequence[Lookups]) -> Lookups:
    """Put lookups one after another."""
    return Lookups._make(map(np.concatenate, zip(*parts, strict=True)))


def steps_of(lookups: Lookups, first: int) -> Ints:
    """Return the step of each lookup, numbered from `first`: each layer of a call is one."""
    begins = np.ones(lookups.lookup_count, np.bool_)
    begins[1:] = (np.diff(lookups.call) != 0) | (np.diff(lookups.layer) != 0)
    steps: Ints = first - 1 + np.cumsum(begins)
    return steps


def _distinct(lookups: Lookups) -> Lookups:
    """Put lookups in the order of their steps; of an expert's, the last one stands for all."""
    order = np.lexsort((lookups.layer, lookups.call))  # it is stable
    lookups = lookups.part(order)
    keys = lookups.call * (int(lookups.place.max()) + 1) + lookups.place
    _, from_end, of_key = np.unique(keys[::-1], return_index=True, return_inverse=True)
    counts = np.bincount(of_key, weights=lookups.chosen_count[::-1]).astype(np.int64)
    last = len(keys) - 1 - from_end
    order = np.argsort(last)
    return lookups.part(last[order])._replace(chosen_count=counts[order])
