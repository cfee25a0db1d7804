"""How many bytes of experts cover how much of what was measured.

The experts are ranked by what was learned, and the coverage is measured on what was held out, where
there is that: ranked by the very counts that they are measured by, experts always look better.
"""

from collections.abc import Mapping

import numpy as np

from moepack.hotness.file import Coverage, CoveredLength, Hotness
from moepack.keys import ExpertKey

PERCENTS = (50, 80, 90, 95, 99)
Counts = Mapping[ExpertKey, int]


def of_hotness(hotness: Hotness, lengths: Counts) -> Coverage:
    """Measure hotness; `lengths` are the bytes of each expert's blob."""
    held = hotness.held_out
    if held is None:
        return of(hotness.counts, hotness.counts, lengths)
    coverage = of(hotness.learned(), held.counts, lengths)
    return coverage._replace(held_out=held.by, token_count=held.token_count)


def of(learned: Counts, measured: Counts, lengths: Counts) -> Coverage:
    """Rank experts by `learned`, as a pack does; measure by `measured`.

    Experts that `learned` lacks come last, in the order of their numbers.
    """
    keys = sorted(lengths)
    blob_lengths = np.array([lengths[key] for key in keys], np.int64)
    rank = np.array([learned.get(key, 0) for key in keys], np.int64)
    order = np.argsort(-rank, kind="stable")
    reached = np.cumsum([measured.get(keys[n], 0) for n in order])
    total = sum(measured.values())
    sizes = np.cumsum(blob_lengths[order])
    covered = []
    for percent in PERCENTS:
        place = int(np.searchsorted(reached, total * percent / 100)) if total else len(keys)
        length = int(sizes[place]) if place < len(keys) else None
        covered.append(CoveredLength(percent, length))
    return Coverage(tuple(covered), int(sizes[-1]) if keys else 0)
