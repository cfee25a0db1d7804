"""Whether ranges of bytes keep apart, as their places in files and in shards have to."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Where = dict[str, Any]
"""The fields of a finding that say what a range belongs to."""


class Place(NamedTuple):
    """A range of bytes, from `start` to `end`; `what` is the noun, `where` whose it is."""

    start: int
    end: int
    what: str
    where: Where


def check_apart(places: Iterable[Place], overlaps: Callable[[Place, Place], None]) -> None:
    """Call `overlaps` with each range that overlaps one before it, and with that.

    Of two that start at the same byte, the longer one comes before.
    """
    reached: Place | None = None
    for place in sorted(places, key=lambda place: (place.start, -place.end)):
        if place.start == place.end:
            continue
        if reached is not None and place.start < reached.end:
            overlaps(place, reached)
        if reached is None or place.end > reached.end:
            reached = place
