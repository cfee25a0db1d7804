"""Prefetching by recency: what it is worth to read ahead what a layer used last.

The experts that a layer used last, and that are not held, are read before its router has chosen.
As when a model runs, what was guessed wrong never enters the cache, so hits are the same.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from moepack.caching.cache import Cache, Tally
from moepack.keys import ExpertKey
from moepack.simulation.replay import steps
from moepack.simulation.spool import Spool


@dataclass(slots=True)
class Guesses:
    """What was read ahead: experts that were missing then, and the bytes of others."""

    useful_count: int = 0
    useful_length: int = 0
    wasted_length: int = 0
    miss_count: int = 0


def guess(
    spool: Spool,
    keys: Sequence[ExpertKey],
    cache: Cache,
    lengths: Mapping[ExpertKey, int],
    count: int,
) -> Guesses:
    """Replay a spool through a cache, and guess ahead of each decode step `count` experts."""
    found, tally = Guesses(), Tally()
    used: dict[int, OrderedDict[ExpertKey, None]] = {}
    for is_decode, chosen in steps(spool, keys):
        recent = used.setdefault(chosen[0].layer, OrderedDict())
        guessed = {key for key in islice(reversed(recent), count) if key not in cache}
        misses = cache.step(chosen, tally).misses
        if is_decode:
            useful = guessed.intersection(misses)
            found.useful_count += len(useful)
            found.useful_length += sum(lengths[key] for key in useful)
            found.wasted_length += sum(lengths[key] for key in guessed - useful)
            found.miss_count += len(misses)
        for key in chosen:
            recent[key] = None
            recent.move_to_end(key)
    return found
