"""Paired rounds: both sides of a comparison right after each other, again and again.

A machine has weather: neighbours, other processes, a drive that tires. So a round measures
everything once in little time, two sides that are compared meet the same moment, and rounds are
spread over all of the time that there is. Time alone ends them, never what they find.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moepack.bench.disturbance import Disturbance
from moepack.bench.meter import Meter
from moepack.bench.timed_reads import Clock, Usage

PAIR = ("blobs", "slices")
"""The layouts that are compared."""

SELDOM = 3
"""Of so many rounds the first measures everything: what no verdict is about needs fewer."""


class Condition(NamedTuple):
    """How layouts are read: a way, a state of the page cache, and how many reads in flight."""

    way: str
    state: str
    depth: int


class Measurement(NamedTuple):
    """What is measured: a layout under a condition."""

    layout: str
    condition: Condition


class Reading(NamedTuple):
    """What reading one portion took."""

    portion: int
    usage: Usage


class Round(NamedTuple):
    """Readings that were taken within little time, one of each measurement that it has."""

    readings: dict[Measurement, Reading]
    disturbance: Disturbance


class Plan(NamedTuple):
    """What is measured: some conditions in every round, all else in one of SELDOM."""

    often: Sequence[Condition]
    seldom: Sequence[Condition]
    layouts: Sequence[str]

    @property
    def conditions(self) -> list[Condition]:
        """All of them."""
        return [*self.often, *self.seldom]


def quiet(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds that nothing disturbed."""
    return [one for one in rounds if not one.disturbance.is_too_much]


def readings_of(rounds: Sequence[Round], measurement: Measurement) -> list[Reading]:
    """Return the readings of a measurement, round by round, where they took any."""
    return [one.readings[measurement] for one in rounds if measurement in one.readings]


def measure(
    read: Callable[[Measurement, int], Usage],
    plan: Plan,
    portion_count: int,
    meter: Meter,
    clock: Clock,
    others: Callable[[], Disturbance],
) -> list[Round]:
    """Do rounds until the time is over, at least one; return them.

    `read` reads a portion, by its number; each visit to a condition takes the next one. The time of
    disturbed rounds is given back, as far as `meter` does.
    """
    rounds: list[Round] = []
    visits = itertools.count()
    for visited in visiting(plan):
        start = clock()
        readings = {}
        for condition, layouts in visited:
            portion = next(visits) % portion_count
            for layout in layouts:
                measurement = Measurement(layout, condition)
                readings[measurement] = Reading(portion, read(measurement, portion))
                meter.advance()
        rounds.append(Round(readings, others()))
        if rounds[-1].disturbance.is_too_much:
            meter.put_off(clock() - start)
        if meter.is_over:
            break
    return rounds


def visiting(plan: Plan) -> Iterator[list[tuple[Condition, list[str]]]]:
    """Yield what each round reads, in its order: the same sequence each time.

    Conditions come in random order. The two of a pair are neighbours, and of two rounds each begins
    one, which of them at random. What has no pair comes before it or behind.
    """
    draw = random.Random(0)
    pair = [layout for layout in plan.layouts if layout in PAIR]
    others = [layout for layout in plan.layouts if layout not in PAIR]
    begun: dict[Condition, list[str]] = {}
    for number in itertools.count():
        is_full = number % SELDOM == 0
        chosen = plan.conditions if is_full else plan.often
        visited = []
        for condition in draw.sample(chosen, len(chosen)):
            before = begun.pop(condition, None)
            order = draw.sample(pair, len(pair)) if before is None else before[::-1]
            if before is None:
                begun[condition] = order
            beside = others if is_full else []
            visited.append((condition, beside + order if draw.random() < 0.5 else order + beside))
        yield visited
