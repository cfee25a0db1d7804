"""Layouts compared in paired rounds, each read in all the ways that there are.

A verdict takes a number of rounds, and a slow drive does few of them with portions that a fast one
needs to be timed at all. So a short trial comes first, from which time and sizes follow. Results
have no influence on the time, or they would be biased.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moepack.bench import layouts, rounds
from moepack.bench.disturbance import Disturbance
from moepack.bench.layouts import Groups, Portion
from moepack.bench.measuring import Clock, Meter
from moepack.bench.rounds import Condition, Measurement, Round
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import MIN_ROUNDS, STRETCHES
from moepack.bench.ways import RawBuffers, Ways, open_ways
from moepack.pack.reading.pack import Pack
from moepack.storage.backend import Backend

USUAL_SECONDS = 45.0
MAX_SECONDS = 600.0
"""The longest time by default, on drives that are too slow for a verdict in USUAL_SECONDS."""

ROUNDS = 4 * STRETCHES
"""The rounds that sizes are chosen for: with several in each stretch an outlier moves none."""

PORTION_LENGTH = 16 << 20
"""Bytes of blobs that are read in one go if there is time: long enough to be timed well."""

WARM_UP_SHARE = 0.2
"""The time for reading everything once, as a share of the time for the rounds."""


class Schedule(NamedTuple):
    """A plan: some `round_count` rounds in so many `seconds`.

    A round reads portions of `portion_length` bytes of blobs, in the mean; `sizes` are the routed
    layers in each. `needed_seconds` are the least in which a verdict can be expected.
    """

    seconds: float
    round_count: int
    portion_length: int
    sizes: list[int]
    needed_seconds: float

    @property
    def total_seconds(self) -> float:
        """About how long the comparison takes; at most twice that if others disturb it."""
        return self.seconds * (1 + WARM_UP_SHARE)


def schedule(layer_seconds: float, lengths: Sequence[int], seconds: float | None) -> Schedule:
    """Choose sizes and time for rounds that take `layer_seconds` for one routed layer.

    `lengths` are the bytes of the blobs of each routed layer. The default for `seconds` is as many
    as a verdict takes, from USUAL_SECONDS to MAX_SECONDS, and USUAL_SECONDS if it takes more.
    """
    needed = MIN_ROUNDS * layer_seconds
    if seconds is None:
        seconds = needed if USUAL_SECONDS < needed <= MAX_SECONDS else USUAL_SECONDS
    most = max(1, int(seconds / ROUNDS / max(layer_seconds, 1e-9)))
    sizes = cut(lengths, most)
    round_seconds = layer_seconds * len(lengths) / len(sizes)
    round_count = max(1, int(seconds / max(round_seconds, 1e-9)))
    return Schedule(seconds, round_count, sum(lengths) // len(sizes), sizes, needed)


def cut(lengths: Sequence[int], most: int) -> list[int]:
    """Cut routed layers into portions of PORTION_LENGTH, or of `most` layers; return their sizes.

    A short rest at the end goes to the last portion.
    """
    sizes: list[int] = []
    count = total = 0
    for length in lengths:
        count += 1
        total += length
        if total >= PORTION_LENGTH or count == most:
            sizes.append(count)
            count = total = 0
    if not sizes:
        return [count]
    sizes[-1] += count
    return sizes


class Rig(NamedTuple):
    """The clock and backends of a comparison: real ones, or those of a simulated drive.

    `make_backend` makes a backend for queues of so many reads; `disturbance` returns that since its
    last call.
    """

    make_backend: Callable[[int], Backend]
    clock: Clock
    disturbance: Callable[[], Disturbance]


class Comparison(NamedTuple):
    """The rounds, their conditions, and the portions that were read.

    `was_cold` is None if the system does not report what is cached.
    """

    schedule: Schedule
    portions: Mapping[str, Sequence[Portion]]
    conditions: Sequence[Condition]
    rounds: Sequence[Round]
    was_cold: bool | None
    buffers: RawBuffers


def compare(
    pack: Pack,
    groups: Mapping[str, Groups],
    rig: Rig,
    depths: Sequence[int],
    seconds: float | None,
    meter: Meter,
    announce: Callable[[Schedule], None] | None = None,
) -> Comparison:
    """Read the same experts in all layouts, in rounds, until their time is over.

    That is `seconds`, or as `schedule` chooses; `announce` is called before. Raises what opening
    and reading raise.
    """
    plan = rounds.plan_of(depths, tuple(groups))
    make_backend, clock, disturbance = rig
    count = len(groups["blobs"])
    single = _portions(groups, [1] * count)
    with open_ways(pack, make_backend, depths, single, clock) as ways:
        layer_seconds = rounds.try_out(_reads(ways, single), plan, count, clock)
        lengths = [_length(portion) for portion in single["blobs"]]
        chosen = schedule(layer_seconds, lengths, seconds)
        if announce is not None:
            announce(chosen)
        portions = _portions(groups, chosen.sizes)
        count = ways.warm_up(portions, WARM_UP_SHARE * chosen.seconds)
        portions = {layout: several[:count] for layout, several in portions.items()}
        meter.begin(chosen.seconds)
        disturbance()
        done = rounds.measure(_reads(ways, portions), plan, count, meter, clock, disturbance)
        return Comparison(chosen, portions, plan.conditions, done, ways.was_cold, ways.buffers)


def _portions(groups: Mapping[str, Groups], sizes: Sequence[int]) -> dict[str, list[Portion]]:
    return {layout: layouts.portions(several, sizes) for layout, several in groups.items()}


def _reads(
    ways: Ways, portions: Mapping[str, Sequence[Portion]]
) -> Callable[[Measurement, int], Usage]:
    return lambda measurement, number: ways.read(measurement, portions[measurement.layout][number])


def _length(portion: Portion) -> int:
    experts = (expert for group in portion.groups for expert in group)
    return sum(read.length for expert in experts for read in expert.file_reads)
