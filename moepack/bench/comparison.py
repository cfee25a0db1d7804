"""Layouts compared in paired rounds, each read in all the ways that there are."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.bench import replay, rounds
from moepack.bench.disturbance import Disturbance, Others
from moepack.bench.meter import Meter
from moepack.bench.pace import MEETING_SHARE, Schedule, schedule, try_out
from moepack.bench.replay import Groups, Portion
from moepack.bench.rounds import Condition, Measurement, Round
from moepack.bench.timed_reads import Clock, Usage
from moepack.bench.ways import RawBuffers, Ways, open_ways, plan_of
from moepack.reading.pack import Pack
from moepack.storage.backend import Backend


class Apparatus(NamedTuple):
    """What a comparison runs on: the real one, or one that only calculates how long it would take.

    `make_backend` makes a backend for queues of so many reads; `others` says what other processes
    did since it was last asked.
    """

    make_backend: Callable[[int], Backend]
    clock: Clock
    others: Callable[[], Disturbance]


class Comparison(NamedTuple):
    """What the rounds found, under which conditions, and what of `portions` was read.

    `was_cold` is None where the system does not say what is cached.
    """

    schedule: Schedule
    portions: Mapping[str, Sequence[Portion]]
    conditions: Sequence[Condition]
    rounds: Sequence[Round]
    was_cold: bool | None
    buffers: RawBuffers


def real_apparatus(make_backend: Callable[[int], Backend], paths: Iterable[Path]) -> Apparatus:
    """Return this machine, and the drives that `paths` lie on."""
    return Apparatus(make_backend, time.perf_counter, Others(paths))


def compare(
    pack: Pack,
    layouts: Mapping[str, Groups],
    apparatus: Apparatus,
    depths: Sequence[int],
    seconds: float | None,
    meter: Meter,
    announce: Callable[[Schedule], None] | None = None,
) -> Comparison:
    """Read the same experts of all layouts in rounds, until their time is over.

    That is `seconds`, or what `schedule` chooses; `announce` is told of it before. Raises what
    opening and reading raise.
    """
    plan = plan_of(depths, tuple(layouts))
    make_backend, clock, others = apparatus
    count = len(layouts["blobs"])
    parts = {layout: replay.portions(of_it, [1] * count) for layout, of_it in layouts.items()}
    with open_ways(pack, make_backend, depths, parts, clock) as ways:
        layer_seconds = try_out(_reads(ways, parts), plan, count, clock)
        lengths = [_length(portion) for portion in parts["blobs"]]
        chosen = schedule(layer_seconds, lengths, seconds)
        if announce is not None:
            announce(chosen)
        portions = {
            layout: replay.portions(of_it, chosen.sizes) for layout, of_it in layouts.items()
        }
        met = ways.meet(portions, MEETING_SHARE * chosen.seconds)
        portions = {layout: of_it[:met] for layout, of_it in portions.items()}
        meter.begin(chosen.seconds)
        others()
        done = rounds.measure(_reads(ways, portions), plan, met, meter, clock, others)
        return Comparison(chosen, portions, plan.conditions, done, ways.was_cold, ways.buffers)


def _reads(
    ways: Ways, portions: Mapping[str, Sequence[Portion]]
) -> Callable[[Measurement, int], Usage]:
    return lambda measurement, number: ways.read(measurement, portions[measurement.layout][number])


def _length(portion: Portion) -> int:
    experts = (expert for group in portion.groups for expert in group)
    return sum(read.length for expert in experts for read in expert.file_reads)
