"""An even router: as many lookups in each step, of experts that are all chosen alike."""

import numpy as np

from moepack.simulation.lookups import Lookups
from moepack.trace.model import Ints


class EvenRouter:
    """Draws other experts for the lookups of a trace: the same each time.

    `expert_counts` [layers] are by the layer's number.
    """

    def __init__(self, expert_counts: Ints) -> None:
        self._counts = expert_counts
        self._first = np.concatenate(([0], np.cumsum(expert_counts)))
        self._random = np.random.Generator(np.random.SFC64(0))

    def places(self, lookups: Lookups) -> Ints:
        """Return a place for each lookup, no two alike in a step: experts layer after layer."""
        count = self._counts[lookups.layer]
        found = self._random.integers(0, count)
        begins = lookups.step_starts
        used = np.diff(np.append(begins, lookups.lookup_count))
        # Where a step uses most of the experts, drawing until all differ would take long.
        crowded = used * 2 > count[begins]
        for begin, number in zip(begins[crowded].tolist(), used[crowded].tolist(), strict=True):
            order = self._random.permutation(int(count[begin]))
            found[begin : begin + number] = order[:number]
        width = int(self._counts.max())
        while len(again := _repeated(lookups.step * width + found)):
            found[again] = self._random.integers(0, count[again])
        return found + self._first[lookups.layer]


def _repeated(keys: Ints) -> Ints:
    """Return where a key comes that was there before."""
    order = np.argsort(keys, kind="stable")
    repeated: Ints = order[1:][np.diff(keys[order]) == 0]
    return repeated
