"""The least budget with which LRU hits, of each lookup: so one pass tells of all budgets.

What a cache of any budget holds is the beginning of one list, the experts by their last use
(Mattson et al. 1970): a lookup hits if all that was used since the expert's last use, and the
expert itself, fit into the budget. As steps give up nothing of their own, the list is looked at as
it was when the step began; and what the step before used is there in any case.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.trace.model import Ints

COLD = -1
"""The need of a lookup that is an expert's first."""


class _Uses(NamedTuple):
    """Uses of experts in their order, a group's after another's; and the step of each."""

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

    def needs(self, group: Ints, key: Ints, weight: Ints, step: Ints) -> Ints:
        """Return the least budget of its group's cache with which each of some lookups hits.

        Lookups are whole steps in their order, `step` their numbers; a step is of one group, and so
        is a key, which has always the same weight. COLD for the first of a key; 0 for what the
        group's step before used, which hits whatever the budget.
        """
        count = len(self._last.key)
        new = _Uses(group, key, weight, step)
        uses = _Uses(*map(np.concatenate, zip(self._last, new, strict=True)))
        order = np.argsort(uses.group, kind="stable")
        uses = _Uses(*(column[order] for column in uses))
        before, is_last = _neighbours(uses.key)
        begins = _step_begins(uses)
        is_new = order >= count
        asked = np.flatnonzero(is_new & (before >= 0))
        needs = np.full(len(uses.key), COLD, np.int64)
        needs[asked] = _needs(uses, before, begins, asked)
        self._last = _Uses(*(column[is_last] for column in uses))
        found = np.empty(len(uses.key), np.int64)
        found[order] = needs
        return found[count:]


def _neighbours(key: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return where each key was used before, -1 for nowhere, and whether it is not used again."""
    order = np.argsort(key, kind="stable")
    same = np.diff(key[order]) == 0
    before = np.full(len(key), -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    is_last = np.ones(len(key), np.bool_)
    is_last[order[:-1][same]] = False
    return before, is_last


def _step_begins(uses: _Uses) -> Ints:
    """Return for each use where its step begins."""
    begins = np.ones(len(uses.step), np.bool_)
    begins[1:] = (np.diff(uses.step) != 0) | (np.diff(uses.group) != 0)
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


def _needs(uses: _Uses, before: Ints, begins: Ints, asked: Ints) -> Ints:
    """Return the needs of the uses at `asked`, which have one before."""
    total = np.concatenate(([0], np.cumsum(uses.weight)))
    last, begin = before[asked], begins[asked]
    # All that was used since, each key once: by its last use before the step began.
    between = total[begin] - total[last + 1] - _used_again(before, uses.weight, last, begin)
    previous = begin - 1  # the last use of the step before, if it is the same group's
    is_held = (uses.step[previous] == uses.step[last]) & (uses.group[previous] == uses.group[last])
    return np.where(is_held, 0, between + uses.weight[asked])


def _used_again(before: Ints, weight: Ints, last: Ints, begin: Ints) -> Ints:
    """Add up, for each pair, the weights of uses between `last` and `begin` that are not the first.

    That is those ahead of `begin` whose key's use before comes after `last`: each key is left with
    one use in between. Blocks of 1, 2, 4 … uses are sorted by `before`; what lies ahead of `begin`
    are blocks, one for each bit of it.
    """
    count = len(before)
    span = count + 1
    found = np.zeros(len(last), np.int64)
    order = np.arange(count)
    for bit in range(int(begin.max(initial=0)).bit_length()):
        keys = (order >> bit) * span + before[order] + 1
        turn = np.argsort(keys)
        order, keys = order[turn], keys[turn]
        sums = np.concatenate(([0], np.cumsum(weight[order])))
        chosen = np.flatnonzero(begin >> bit & 1)
        block = (begin[chosen] >> bit) - 1
        wanted = block * span + last[chosen] + 1
        ascending = np.argsort(wanted)  # what is ascending is found three times as fast
        first = np.empty(len(chosen), np.int64)
        first[ascending] = np.searchsorted(keys, wanted[ascending], side="right")
        found[chosen] += sums[(block + 1) << bit] - sums[first]
    return found
