"""How sure a ratio is: an interval from the ratios of many rounds, one after the other.

The weather lasts longer than a round, so neighbouring rounds resemble each other, and an interval
from single rounds would be too narrow. The run is cut into a few long stretches instead, and the
interval goes from the lowest of them to the highest. Each has an even chance to lie on either side
of the truth, so that all `n` lie on one side of it once in 2^(n - 1) runs, whatever the noise is
like (the sign test). A bound is passed where it was passed in every stretch of the run.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""That intervals hold: all that are asked for together, since one of many is soon wrong."""


class Interval(NamedTuple):
    """A ratio, and the bounds between which the true one lies, as sure as CONFIDENCE."""

    ratio: float
    low: float
    high: float


def stretch_count(interval_count: int) -> int:
    """Return how many stretches so many intervals need, to hold together (Bonferroni)."""
    return 1 + math.ceil(math.log2(interval_count / (1 - CONFIDENCE)))


def interval(ratios: Sequence[float], stretches: int) -> Interval | None:
    """Return the ratio of all rounds and its interval; None for fewer rounds than `stretches`."""
    if len(ratios) < stretches:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    ends = [number * len(logs) // stretches for number in range(stretches + 1)]
    values = [_middle(logs[start:end]) for start, end in itertools.pairwise(ends)]
    return Interval(*map(math.exp, (statistics.median(values), min(values), max(values))))


def _middle(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs (Hodges and Lehmann 1963).

    One value that is far off does not move it, as with the median; all others count for more.
    """
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((one + other) / 2 for one, other in pairs)
