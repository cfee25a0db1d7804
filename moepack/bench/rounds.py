"""Paired rounds: both sides of a comparison right after each other, again and again.

Neighbours, other processes and a drive that gets hot change from minute to minute. So each round
measures everything once in little time, and the two sides of a pair meet the same moment. Time
alone ends the rounds, never their results.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moepack.bench.disturbance import Disturbance
from moepack.bench.measuring import Clock, Meter
from moepack.bench.timed_reads import Usage

PAIR = ("blobs", "slices")
"""The layouts that are compared."""

FULL_ROUND_INTERVAL = 3
"""The first of so many rounds measures everything, the others only pairs."""

_TRIALS = 3
_LONG_TRIAL_SECONDS = 1.0
"""A trial that takes longer is not repeated: opening files and chance matter little in it."""


class Condition(NamedTuple):
    """How layouts are read: a way, a state of the page cache, and the reads in flight."""

    way: str
    state: str
    depth: int


class Measurement(NamedTuple):
    """A layout under a condition."""

    layout: str
    condition: Condition


class Reading(NamedTuple):
    """The usage of reading one portion, by its number."""

    portion: int
    usage: Usage


class Round(NamedTuple):
    """One reading of each measurement, all taken within little time."""

    readings: dict[Measurement, Reading]
    disturbance: Disturbance


class RoundPlan(NamedTuple):
    """The layouts, the conditions of every round, and those of one in FULL_ROUND_INTERVAL."""

    often: Sequence[Condition]
    seldom: Sequence[Condition]
    layouts: Sequence[str]

    @property
    def conditions(self) -> list[Condition]:
        """All conditions."""
        return [*self.often, *self.seldom]


def plan_of(depths: Sequence[int], layouts: Sequence[str]) -> RoundPlan:
    """Plan to read in each way with a cold page cache, and seldom with a warm one or mapped."""
    return RoundPlan(
        often=[Condition(way, "cold", depth) for way in ("reader", "raw") for depth in depths],
        seldom=[
            *(Condition("mapped", state, 1) for state in ("cold", "warm")),
            Condition("reader", "warm", depths[0]),
        ],
        layouts=layouts,
    )


def undisturbed(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds that nothing disturbed."""
    return [one for one in rounds if not one.disturbance.is_too_much]


def readings_of(rounds: Sequence[Round], measurement: Measurement) -> list[Reading]:
    """Return the readings of a measurement in the order of the rounds."""
    return [one.readings[measurement] for one in rounds if measurement in one.readings]


def measurements(plan: RoundPlan, portion_count: int) -> Iterator[list[tuple[Measurement, int]]]:
    """Yield the measurements of each round with the portion to read: the same sequence each time.

    Conditions come in random order, and each takes the next portion. The two of a pair are
    neighbours; which is first is random in one round and the other way round in the next. The
    other layouts come before or after the pair.
    """
    draw = random.Random(0)
    pair = [layout for layout in plan.layouts if layout in PAIR]
    others = [layout for layout in plan.layouts if layout not in PAIR]
    orders: dict[Condition, list[str]] = {}
    portions = itertools.cycle(range(portion_count))
    for number in itertools.count():
        is_full = number % FULL_ROUND_INTERVAL == 0
        conditions = plan.conditions if is_full else plan.often
        steps = []
        for condition in draw.sample(conditions, len(conditions)):
            order = orders.pop(condition, [])[::-1]
            if not order:
                order = orders[condition] = draw.sample(pair, len(pair))
            beside = others if is_full else []
            portion = next(portions)
            for layout in beside + order if draw.random() < 0.5 else order + beside:
                steps.append((Measurement(layout, condition), portion))
        yield steps


def try_out(
    read: Callable[[Measurement, int], object], plan: RoundPlan, portion_count: int, clock: Clock
) -> float:
    """Do some rounds; return the seconds of an average one, had nothing come in between.

    `read` reads a portion, by its number. The first round opens files, starts threads and wakes the
    drive, so that of each measurement the shortest time counts.
    """
    shortest: dict[Measurement, float] = {}
    start = clock()
    full_rounds = itertools.islice(measurements(plan, portion_count), 0, None, FULL_ROUND_INTERVAL)
    for number, steps in enumerate(itertools.islice(full_rounds, _TRIALS)):
        for measurement, portion in steps:
            begin = clock()
            read(measurement, portion)
            seconds = clock() - begin
            shortest[measurement] = min(seconds, shortest.get(measurement, seconds))
        if clock() - start > _LONG_TRIAL_SECONDS * (number + 1):
            break
    return sum(
        seconds
        if one.condition in plan.often and one.layout in PAIR
        else seconds / FULL_ROUND_INTERVAL
        for one, seconds in shortest.items()
    )


def measure(
    read: Callable[[Measurement, int], Usage],
    plan: RoundPlan,
    portion_count: int,
    meter: Meter,
    clock: Clock,
    disturbance: Callable[[], Disturbance],
) -> list[Round]:
    """Do rounds until the time is over, at least one; return them.

    `read` reads a portion, by its number. The time of disturbed rounds is given back, as far as
    `meter` does.
    """
    rounds: list[Round] = []
    for steps in measurements(plan, portion_count):
        start = clock()
        readings = {}
        for measurement, portion in steps:
            readings[measurement] = Reading(portion, read(measurement, portion))
            meter.advance()
        rounds.append(Round(readings, disturbance()))
        if rounds[-1].disturbance.is_too_much:
            meter.extend(clock() - start)
        if meter.is_over:
            break
    return rounds
