"""How many bytes of experts cover how much of what was measured.

The experts are ranked by what was learned, and the coverage is measured on what was held out, where
there is that: ranked by the very counts that they are measured by, experts always look better.
"""

from collections.abc import Mapping

from moepack.hotness.model import Coverage, CoveredLength, Hotness
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
    hottest_first = sorted(sorted(lengths), key=lambda key: -learned.get(key, 0))
    total = sum(measured.values())
    covered = []
    reached = length = 0
    percents = list(PERCENTS)
    for key in hottest_first:
        reached += measured.get(key, 0)
        length += lengths[key]
        while total and percents and reached * 100 >= total * percents[0]:
            covered.append(CoveredLength(percents.pop(0), length))
    covered += [CoveredLength(percent, None) for percent in percents]
    return Coverage(tuple(covered), length)
