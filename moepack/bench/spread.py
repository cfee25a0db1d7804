"""What several rounds gave: the median and the ends."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The median of several rounds, the lowest and the highest; the unit is what was measured."""

    median: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the ends of what several rounds gave; there is one at least."""
    return Spread(statistics.median(values), min(values), max(values))
