"""A curve: how many lookups hit, and how many bytes miss, at every budget."""

import numpy as np

from moepack.caching.cache import Tally
from moepack.simulation.stack import COLD
from moepack.trace.model import Ints

_MOST_PARTS = 64


class Curve:
    """Counts lookups by the least budget with which they hit.

    Memory grows with the number of different needs: where all experts have one length these are no
    more than there are experts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.cold_count = 0
        self.length = 0
        """The bytes of all lookups."""
        self._parts: list[tuple[Ints, Ints, Ints]] = []

    def add(self, needs: Ints, lengths: Ints) -> None:
        """Take lookups: their needs, COLD for those that hit at no budget, and their bytes."""
        self.count += len(needs)
        self.length += int(lengths.sum())
        is_warm = needs != COLD
        self.cold_count += len(needs) - int(np.count_nonzero(is_warm))
        warm = np.ones(int(np.count_nonzero(is_warm)), np.int64)
        self._parts.append(_summed(needs[is_warm], warm, lengths[is_warm]))
        if len(self._parts) == _MOST_PARTS:
            self._parts = [self._merged()]

    def tally(self, budget: int) -> Tally:
        """Return what a cache of a budget would have counted."""
        needs, counts, lengths = self._cumulated()
        place = int(np.searchsorted(needs, budget, side="right"))
        hit_count, hit_length = int(counts[place]), int(lengths[place])
        return Tally(hit_count, self.count - hit_count, self.length - hit_length)

    def least_budget(self, share: float) -> int | None:
        """Return the least budget with so large a share of the hits that there can be."""
        needs, counts, _ = self._cumulated()
        if not len(needs):
            return None
        return int(needs[np.searchsorted(counts[1:], counts[-1] * share)])

    def _cumulated(self) -> tuple[Ints, Ints, Ints]:
        if len(self._parts) != 1:
            self._parts = [self._merged()]
        needs, counts, lengths = self._parts[0]
        return needs, _from_zero(counts), _from_zero(lengths)

    def _merged(self) -> tuple[Ints, Ints, Ints]:
        if not self._parts:
            none = np.zeros(0, np.int64)
            return none, none, none
        needs, counts, lengths = map(np.concatenate, zip(*self._parts, strict=True))
        return _summed(needs, counts, lengths)


def _from_zero(values: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(values)))


def _summed(needs: Ints, counts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Add up what has the same need."""
    found, place = np.unique(needs, return_inverse=True)
    sums = []
    for values in (counts, lengths):
        total = np.zeros(len(found), np.int64)
        np.add.at(total, place, values)
        sums.append(total)
    return found, sums[0], sums[1]
