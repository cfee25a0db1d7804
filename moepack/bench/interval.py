"""How sure a ratio is: an interval from the ratios of many rounds, one after the other.

The weather lasts longer than a round, so neighbouring rounds resemble each other, and an interval
from single rounds would be too narrow. The run is cut into a few long stretches instead, and the
interval goes from the second lowest of them to the second highest: a bound is passed where it was
passed in every stretch of the run but one. Each has an even chance to lie on either side of the
truth, so that of nine all, or all but one, lie on one side of it in 20 of 512 runs, whatever the
noise is like (the sign test).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

STRETCHES = 9
"""The fewest of which the second lowest and the second highest hold the truth with 95 %."""


class Interval(NamedTuple):
    """A ratio, and the bounds between which the true one lies: with 96 %."""

    ratio: float
    low: float
    high: float


def interval(ratios: Sequence[float]) -> Interval | None:
    """Return the ratio of all rounds and its interval; None for fewer rounds than STRETCHES."""
    if len(ratios) < STRETCHES:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    ends = [number * len(logs) // STRETCHES for number in range(STRETCHES + 1)]
    values = sorted(_middle(logs[start:end]) for start, end in itertools.pairwise(ends))
    return Interval(*map(math.exp, (statistics.median(values), values[1], values[-2])))


def _middle(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs (Hodges and Lehmann 1963).

    One value that is far off does not move it, as with the median; all others count for more.
    """
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((one + other) / 2 for one, other in pairs)
