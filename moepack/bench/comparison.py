"""Layouts compared in paired rounds, each read in all the ways that there are."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.bench import rounds
from moepack.bench.disturbance import Disturbance, Others
from moepack.bench.meter import Meter
from moepack.bench.replay import Portion
from moepack.bench.rounds import Condition, Round
from moepack.bench.timed_reads import Clock
from moepack.bench.ways import RawBuffers, open_ways, plan_of
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
    portions: Mapping[str, Sequence[Portion]],
    apparatus: Apparatus,
    depths: Sequence[int],
    meter: Meter,
) -> Comparison:
    """Read the portions of all layouts in rounds, until `meter` says that the time is over.

    `portions` has as many of each layout. Raises what opening and reading raise.
    """
    plan = plan_of(depths, tuple(portions))
    make_backend, clock, others = apparatus
    with open_ways(pack, make_backend, depths, portions, clock) as ways:
        ways.meet()
        meter.begin()
        others()
        count = len(portions["blobs"])
        done = rounds.measure(ways.read, plan, count, meter, clock, others)
        return Comparison(portions, plan.conditions, done, ways.was_cold, ways.buffers)
