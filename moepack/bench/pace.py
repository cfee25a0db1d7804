"""How long a comparison takes on a drive: from a short trial, the sizes of its rounds and its time.

A verdict takes a number of rounds, and a slow drive does few of them with portions that a fast one
needs to be timed at all. What is found does not matter here, only what finding it takes.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moepack.bench.interval import STRETCHES
from moepack.bench.rounds import PAIR, SELDOM, Measurement, Plan, visiting
from moepack.bench.timed_reads import Clock

USUAL_SECONDS = 45.0
MOST_SECONDS = 600.0
"""What is taken without being asked for, where a verdict takes it."""

ROUNDS = 4 * STRETCHES
"""How many rounds there should be: with several in each stretch, one that is far off moves none."""

LEAST_ROUNDS = 4 * STRETCHES // 3
"""How many have to be expected: as many as an interval takes, and some that are disturbed."""

PORTION = 16 << 20
"""Bytes of blobs that are read in one go, where there is time: long enough to be timed well."""

MEETING_SHARE = 0.2
"""What reading everything once may take, as a share of the time for the rounds."""

_TRIALS = 3
_LONG = 1.0
"""Seconds of a round that is tried once: it is no longer about opening files, nor chance."""


class Schedule(NamedTuple):
    """What is going to be done: rounds for so many `seconds`, some `round_count` of them.

    A round reads portions of `portion_length` bytes of blobs, in the mean; `sizes` are the routed
    layers in each. `needed_seconds` are those that a verdict takes, at least.
    """

    seconds: float
    round_count: int
    portion_length: int
    sizes: list[int]
    needed_seconds: float

    @property
    def total_seconds(self) -> float:
        """What the comparison takes, about; twice that, at most, where others disturb it."""
        return self.seconds * (1 + MEETING_SHARE)


def try_out(
    read: Callable[[Measurement, int], object], plan: Plan, portion_count: int, clock: Clock
) -> float:
    """Do some rounds; return the seconds of one in the mean, had nothing come in between.

    `read` reads a portion, by its number. The first round opens files and starts threads, and wakes
    the drive; so of each measurement the shortest time counts.
    """
    visits = itertools.count()
    shortest: dict[Measurement, float] = {}
    start = clock()
    for number in range(_TRIALS):
        for condition, layouts in next(visiting(plan)):
            portion = next(visits) % portion_count
            for layout in layouts:
                measurement, begun = Measurement(layout, condition), clock()
                read(measurement, portion)
                takes = clock() - begun
                shortest[measurement] = min(takes, shortest.get(measurement, takes))
        if clock() - start > _LONG * (number + 1):
            break
    return sum(
        seconds if one.condition in plan.often and one.layout in PAIR else seconds / SELDOM
        for one, seconds in shortest.items()
    )


def schedule(layer_seconds: float, lengths: Sequence[int], seconds: float | None) -> Schedule:
    """Choose sizes and time, where a round on one routed layer takes `layer_seconds`.

    `lengths` are the bytes of the blobs of each routed layer. `seconds` are those that were asked
    for; by default as many as a verdict takes, from USUAL_SECONDS to MOST_SECONDS, and no more than
    usual where it takes longer.
    """
    needed = LEAST_ROUNDS * layer_seconds
    if seconds is None:
        seconds = needed if USUAL_SECONDS < needed <= MOST_SECONDS else USUAL_SECONDS
    most = max(1, int(seconds / ROUNDS / max(layer_seconds, 1e-9)))
    sizes = cut(lengths, most)
    round_seconds = layer_seconds * len(lengths) / len(sizes)
    round_count = max(1, int(seconds / max(round_seconds, 1e-9)))
    return Schedule(seconds, round_count, sum(lengths) // len(sizes), sizes, needed)


def cut(lengths: Sequence[int], most: int) -> list[int]:
    """Cut routed layers into portions of PORTION bytes, or `most` layers; return their sizes.

    What is left at the end goes to the last one where that is short.
    """
    sizes: list[int] = []
    count = length = 0
    for more in lengths:
        count += 1
        length += more
        if length >= PORTION or count == most:
            sizes.append(count)
            count = length = 0
    if not sizes:
        return [count]
    if count:
        sizes[-1] += count
    return sizes
