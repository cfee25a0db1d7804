"""The hotness that a pack's index holds, and the bytes of the experts that cover shares of it."""

from collections.abc import Mapping
from typing import NamedTuple

from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.pack.reading.locations import ExpertHotness
from moepack.pack.reading.pack import Pack

PERCENTS = (50, 80, 90, 95, 99)


class CoveredLength(NamedTuple):
    """The bytes of the hottest experts that make up `percent` of the selections.

    `length` is None if all experts do not reach that percent.
    """

    percent: int
    length: int | None


class Coverage(NamedTuple):
    """The bytes that cover each percentage; all experts have `total_length`."""

    lengths: tuple[CoveredLength, ...]
    total_length: int


def measure(counts: Mapping[ExpertKey, int], lengths: Mapping[ExpertKey, int]) -> Coverage:
    """Return the coverage of experts by their counts; `lengths` are those of their blobs."""
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


def routed_experts(pack: Pack) -> dict[ExpertKey, ExpertHotness]:
    """Return the hotness of each routed expert, by its key."""
    return {
        ExpertKey(layer, expert): pack.hotness(layer, expert, family=ROUTED_FAMILY)
        for layer, expert_count in pack.shape.expert_counts.items()
        for expert in range(expert_count)
    }


def stored_counts(pack: Pack) -> dict[ExpertKey, int]:
    """Return the selections of each expert, without zeros and unmeasured experts."""
    return {key: one.hotness for key, one in routed_experts(pack).items() if one.hotness}
