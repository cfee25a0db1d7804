"""Tools of every benchmark: turns, the spread of several measurements, and the time it may take."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from moepack.common.phases import Progress

Side = TypeVar("Side")
Result = TypeVar("Result")


class Spread(NamedTuple):
    """The median of several measurements, the lowest and the highest, in their unit."""

    median: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the ends of one value or more."""
    return Spread(statistics.median(values), min(values), max(values))


def in_turns(sides: Mapping[Side, Callable[[], Result]], rounds: int) -> dict[Side, list[Result]]:
    """Measure each side `rounds` times, there and back again: ABBA, ABBA, and so on.

    So a drive that warms up or a busy neighbour favours neither side. Returns the results of each
    side, round by round.
    """
    results: dict[Side, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(list(sides)):
            results[side].append(sides[side]())
    return results


class Meter:
    """The time left of a benchmark, reported as milliseconds to `progress`.

    `seconds` are an estimate of all of it, until `begin` sets the time that is left.
    """

    def __init__(self, seconds: float, progress: Progress | None) -> None:
        self._progress = progress
        self._start = time.perf_counter()
        self._end = self._start + seconds
        self._reported = 0

    def begin(self, seconds: float) -> None:
        """Set the end to `seconds` from now."""
        self._end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() >= self._end

    def advance(self) -> None:
        """Report the time since the last report."""
        self._report(min(time.perf_counter(), self._end))

    def finish(self) -> None:
        """Report the rest."""
        self._report(self._end)

    def _report(self, until: float) -> None:
        count = max(0, int((until - self._start) * 1000) - self._reported)
        self._reported += count
        if self._progress is not None and count:
            self._progress(count, int((self._end - self._start) * 1000))
