"""Ranking experts by learned counts, and their coverage of other counts."""

import numpy as np
from numpy.typing import NDArray

from moepack.traces.model import Ints


def hottest_first(counts: Ints) -> Ints:
    """Return the indices of counts in falling order; equal counts stay in their order."""
    return np.argsort(-counts, kind="stable")


def hottest_within(counts: Ints, lengths: Ints, budget: int) -> NDArray[np.bool_]:
    """Return whether each expert is among the hottest that fit into the budget together."""
    order = hottest_first(counts)
    is_hot = np.zeros(len(counts), np.bool_)
    is_hot[order[np.cumsum(lengths[order]) <= budget]] = True
    return is_hot


def covered_count(learned: Ints, measured: Ints, lengths: Ints, budget: int) -> int:
    """Return the measured selections of the experts that are hottest by the learned counts."""
    return int(measured[hottest_within(learned, lengths, budget)].sum())
