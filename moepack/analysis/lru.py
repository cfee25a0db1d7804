"""The hit rate of an LRU cache in each layer, of every size at once.

A cache of the c experts of a layer that were used last has an expert if fewer than c others were
chosen since it was (the stack distance, Mattson et al. 1970): so one pass tells of all sizes.
Prefill is left out, as in the working set.
"""

import numpy as np

from moepack.errors import TraceError
from moepack.trace.expert_places import ExpertPlaces, padded
from moepack.trace.model import Ints, Item, Shorts
from moepack.trace.steps import Steps, StepStream

MOST_TOKENS = 1 << 13
"""Of a longer trace the first so many are looked at: each takes some 0.2 ms."""
MAX_CELLS = 1 << 22
"""Layers times the experts of the largest: thirty times those of any model."""
_NEVER = -1


class LayerLru:
    """Follows the selections of each layer, token by token. Caches go on over requests."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._steps = StepStream(most_tokens=most_tokens)
        self._places = ExpertPlaces()
        self._column_of = np.zeros(0, np.int64)
        """By place: the column of the expert in its layer's row, in the order of being met."""
        self._clock = 0
        # By row of the layer, then by column: when each expert was chosen last, and how many hits
        # there were at each stack distance.
        self._last = np.full((0, 0), _NEVER, np.int64)
        self._hits = np.zeros((0, 0), np.int64)
        self._chosen = np.zeros(0, np.int64)

    @property
    def token_count(self) -> int:
        """How many tokens were looked at."""
        return self._steps.token_count

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were met."""
        return self._places.layers

    def add(self, item: Item) -> None:
        """Take the next piece of a trace."""
        steps = self._steps.take(item)
        if steps is not None and len(steps.layer):
            self._add_steps(steps)

    def hit_rate(self, capacity: int, layer: int | None = None) -> float | None:
        """Return the share of selections that caches of `capacity` experts a layer hold."""
        rows = slice(None) if layer is None else self._places.layers.index(layer)
        chosen = int(self._chosen[rows].sum())
        return int(self._hits[rows, ..., :capacity].sum()) / chosen if chosen else None

    def _add_steps(self, steps: Steps) -> None:
        rows = self._places.rows(steps.layer)
        columns = self._columns(rows, self._places.of(steps.layer, steps.expert))
        for token in range(steps.token_count):
            chosen = slice(int(steps.starts[token]), int(steps.starts[token + 1]))
            for turn in _turns(steps.layer[chosen]):
                self._touch(rows[chosen][turn], columns[chosen][turn])

    def _columns(self, rows: Ints, places: Ints) -> Ints:
        """Return each expert's column; those that are met for the first time get the next one."""
        self._column_of = padded(self._column_of, self._places.count, _NEVER)
        counts = np.count_nonzero(self._last != _NEVER, axis=1).tolist()
        counts += [0] * (len(self._places.layers) - len(counts))
        is_new = self._column_of[places] == _NEVER
        new = zip(rows[is_new].tolist(), places[is_new].tolist(), strict=True)
        for row, place in dict.fromkeys(new):
            self._column_of[place] = counts[row]
            counts[row] += 1
        more = (len(counts) - self._last.shape[0], max(counts) - self._last.shape[1])
        if len(counts) * max(counts) > MAX_CELLS:
            problem = "more layers or experts than any model has"
            raise TraceError(problem, expected=f"<= {MAX_CELLS:,} caches of one expert")
        widths = ((0, more[0]), (0, max(more[1], 0)))
        self._last = np.pad(self._last, widths, constant_values=_NEVER)
        self._hits = np.pad(self._hits, widths)
        self._chosen = np.pad(self._chosen, widths[0])
        return self._column_of[places]

    def _touch(self, rows: Ints, columns: Ints) -> None:
        """Choose one expert in each of several layers."""
        before = self._last[rows, columns]
        distance = np.count_nonzero(self._last[rows] > before[:, None], axis=1)
        is_known = before != _NEVER
        self._hits[rows[is_known], distance[is_known]] += 1
        self._chosen[rows] += 1
        self._last[rows, columns] = self._clock
        self._clock += 1


def _turns(layer: Shorts) -> list[Ints]:
    """Divide a token's selections: first the first of each layer, then the second of each."""
    order = np.argsort(layer, kind="stable")
    begins = np.flatnonzero(np.diff(layer[order].astype(np.int64), prepend=-1))
    turn = np.arange(len(layer)) - np.repeat(begins, np.diff(np.append(begins, len(layer))))
    return [order[turn == number] for number in range(int(turn.max()) + 1)]
