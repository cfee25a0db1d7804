"""Measuring in turns, so that a drive that warms up or a busy neighbour favours nobody."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Side = TypeVar("Side")
Result = TypeVar("Result")


def in_turns(sides: Mapping[Side, Callable[[], Result]], rounds: int) -> dict[Side, list[Result]]:
    """Measure each side `rounds` times, there and back again: ABBA, ABBA, and so on.

    Return the results of each side, round by round.
    """
    results: dict[Side, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(list(sides)):
            results[side].append(sides[side]())
    return results
