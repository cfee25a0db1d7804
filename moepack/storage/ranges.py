"""Ranges of a file's bytes: half-open, ascending and apart."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of a file, ascending and apart."""


class RangeSet:
    """The ranges of one file, to be asked what they cover."""

    def __init__(self, ranges: Ranges) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def covers(self, start: int, end: int) -> bool:
        """Return whether all bytes from `start` to `end` are in one of the ranges."""
        number = bisect_right(self._starts, start) - 1
        return number >= 0 and end <= self._ends[number]


def read_ranges(pairs: Iterable[Any]) -> Ranges:
    """Return ranges as JSON has them; raise ValueError or TypeError for anything else."""
    ranges = tuple((start, end) for start, end in pairs)
    edges = [edge for pair in ranges for edge in pair]
    is_ascending = all(first < second for first, second in pairwise([-1, *edges]))
    if not (is_ascending and {int}.issuperset(map(type, edges))):
        raise ValueError("no such ranges")
    return ranges


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ascending ranges as one where they touch."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
