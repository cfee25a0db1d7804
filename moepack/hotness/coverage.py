"""How many bytes of experts cover how much of what was measured."""

from collections.abc import Mapping
from typing import NamedTuple

from moepack.keys import ExpertKey

PERCENTS = (50, 80, 90, 95, 99)


class CoveredLength(NamedTuple):
    """The bytes of the hottest experts that make up `percent` of what was chosen.

    `length` is None where all experts do not reach that percent.
    """

    percent: int
    length: int | None


class Coverage(NamedTuple):
    """How many bytes hold how much of what was measured, of `total_length` in all."""

    lengths: tuple[CoveredLength, ...]
    total_length: int


def of(counts: Mapping[ExpertKey, int], lengths: Mapping[ExpertKey, int]) -> Coverage:
    """Rank experts by their counts, and measure by the same; `lengths` are those of their blobs."""
    hottest_first = sorted(sorted(lengths), key=lambda key: -counts.get(key, 0))
    total = sum(counts.values())
    covered = []
    reached = length = 0
    percents = list(PERCENTS)
    for key in hottest_first:
        reached += counts.get(key, 0)
        length += lengths[key]
        while total and percents and reached * 100 >= total * percents[0]:
            covered.append(CoveredLength(percents.pop(0), length))
    covered += [CoveredLength(percent, None) for percent in percents]
    return Coverage(tuple(covered), length)
