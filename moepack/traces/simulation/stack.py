"""Byte-weighted LRU stack distances: one pass gives the hits at all budgets.

The resident experts at any budget are the beginning of one list, the experts by their last use
(Mattson et al. 1970): a lookup hits if all experts used since the expert's last use, and the expert
itself, fit into the budget. As steps never evict their own experts, distances are those in the list
as it was when the step began; and the experts of the step before are resident in any case.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.traces.model import Ints, changes

COLD = -1
"""The stack distance of an expert's first lookup: it hits at no budget."""


class _Uses(NamedTuple):
    """Uses of experts in their order, one group after another."""

    group: Ints
    key: Ints
    weight: Ints
    step: Ints


class LruStack:
    """Follows LRU caches, one for each group, in memory bounded by the number of keys."""

    def __init__(self) -> None:
        none = np.zeros(0, np.int64)
        self._last = _Uses(none, none, none, none)
        """The last use of each key, by group; the latest last."""

    def distances(self, group: Ints, key: Ints, weight: Ints, step: Ints) -> Ints:
        """Return each lookup's stack distance: the smallest budget of its group at which it hits.

        Lookups are whole steps in their order, `step` their numbers; a step is of one group, and so
        is a key, which always has the same weight. COLD for the first lookup of a key; 0 for keys
        of the group's step before, which hit whatever the budget.
        """
        count = len(self._last.key)
        new = _Uses(group, key, weight, step)
        uses = _Uses(*map(np.concatenate, zip(self._last, new, strict=True)))
        order = np.argsort(uses.group, kind="stable")
        uses = _Uses(*(column[order] for column in uses))
        before, is_last = _neighbours(uses.key)
        begins = _step_begins(uses)
        is_new = order >= count
        warm = np.flatnonzero(is_new & (before >= 0))
        distances = np.full(len(uses.key), COLD, np.int64)
        distances[order[warm]] = _distances(uses, before, begins, warm)
        self._last = _Uses(*(column[is_last] for column in uses))
        return distances[count:]


def _neighbours(key: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the index of each key's use before, -1 for none, and whether it is its last use."""
    order = np.argsort(key, kind="stable")
    same = np.diff(key[order]) == 0
    before = np.full(len(key), -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    is_last = np.ones(len(key), np.bool_)
    is_last[order[:-1][same]] = False
    return before, is_last


def _step_begins(uses: _Uses) -> Ints:
    """Return the index at which the step of each use begins."""
    begins = changes(uses.step, uses.group)
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


def _distances(uses: _Uses, before: Ints, begins: Ints, warm: Ints) -> Ints:
    """Return the stack distances of the uses at `warm`, which have one before."""
    total = np.concatenate(([0], np.cumsum(uses.weight)))
    last, begin = before[warm], begins[warm]
    # All keys used since, each once: by its last use before the step began.
    between = total[begin] - total[last + 1] - _used_again(before, uses.weight, last, begin)
    previous = begin - 1  # the last use of the step before, if it is the same group's
    is_kept = (uses.step[previous] == uses.step[last]) & (uses.group[previous] == uses.group[last])
    return np.where(is_kept, 0, between + uses.weight[warm])


def _used_again(before: Ints, weight: Ints, last: Ints, begin: Ints) -> Ints:
    """Sum up, for each pair, the weights of repeated uses between `last` and `begin`.

    Their key's use before comes after `last`: without them each key has one use in between. Blocks
    of 1, 2, 4 … uses are sorted by `before`; ahead of `begin` lie blocks, one for each bit of it.
    """
    count = len(before)
    span = count + 1
    total = np.zeros(len(last), np.int64)
    order = np.arange(count)
    for bit in range(int(begin.max(initial=0)).bit_length()):
        keys = (order >> bit) * span + before[order] + 1
        turn = np.argsort(keys)
        order, keys = order[turn], keys[turn]
        sums = np.concatenate(([0], np.cumsum(weight[order])))
        pairs = np.flatnonzero(begin >> bit & 1)
        block = (begin[pairs] >> bit) - 1
        targets = block * span + last[pairs] + 1
        ascending = np.argsort(targets)  # numpy finds ascending targets three times as fast
        first = np.empty(len(pairs), np.int64)
        first[ascending] = np.searchsorted(keys, targets[ascending], side="right")
        total[pairs] += sums[(block + 1) << bit] - sums[first]
    return total
