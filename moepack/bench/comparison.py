"""Layouts compared in paired rounds, each read in all the ways that there are."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moepack.bench import rounds
from moepack.bench.free_cpus import FreeCpus
from moepack.bench.meter import Meter
from moepack.bench.replay import Portion
from moepack.bench.rounds import Condition, Round
from moepack.bench.timed_reads import Clock
from moepack.bench.ways import RawBuffers, open_ways, plan_of
from moepack.reading.pack import Pack
from moepack.storage.backend import Backend


class Machine(NamedTuple):
    """What a comparison runs on: the real one, or one that only calculates how long it would take.

    `make_backend` makes a backend for queues of so many reads; `free_cpus` says how many CPUs other
    processes left free since it was last asked.
    """

    make_backend: Callable[[int], Backend]
    clock: Clock
    free_cpus: Callable[[], float | None]


class Comparison(NamedTuple):
    """What the rounds found, under which conditions, and what of `portions` was read.

    `was_cold` is None where the system does not say what is cached.
    """

    portions: Mapping[str, Sequence[Portion]]
    conditions: Sequence[Condition]
    rounds: Sequence[Round]
    was_cold: bool | None
    buffers: RawBuffers


def real_machine(make_backend: Callable[[int], Backend]) -> Machine:
    """Return this machine."""
    return Machine(make_backend, time.perf_counter, FreeCpus())


def compare(
    pack: Pack,
    portions: Mapping[str, Sequence[Portion]],
    machine: Machine,
    depths: Sequence[int],
    meter: Meter,
) -> Comparison:
    """Read the portions of all layouts in rounds, until `meter` says that the time is over.

    `portions` has as many of each layout. Raises what opening and reading raise.
    """
    plan = plan_of(depths, tuple(portions))
    make_backend, clock, free_cpus = machine
    with open_ways(pack, make_backend, depths, portions, clock) as ways:
        ways.meet()
        meter.begin()
        count = len(portions["blobs"])
        done = rounds.measure(ways.read, plan, count, meter, clock, free_cpus)
        return Comparison(portions, plan.conditions, done, ways.was_cold, ways.buffers)
