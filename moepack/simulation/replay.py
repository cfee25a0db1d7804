"""A replay: the lookups of a trace run through one cache, step by step."""

from collections.abc import Iterator, Sequence

from moepack.caching.cache import Cache, Tally
from moepack.keys import ExpertKey
from moepack.simulation.lookups import Lookups
from moepack.simulation.spool import Spool


def replay(spool: Spool, keys: Sequence[ExpertKey], cache: Cache) -> tuple[Tally, Tally]:
    """Run all lookups of a spool through a cache; return what prefill found, and decode.

    `keys` are the experts by place.
    """
    tallies = Tally(), Tally()
    for is_decode, chosen in steps(spool, keys):
        cache.step(chosen, tallies[is_decode])
    return tallies


def steps(spool: Spool, keys: Sequence[ExpertKey]) -> Iterator[tuple[bool, list[ExpertKey]]]:
    """Yield each step: whether it is decode, and what it looks up."""
    for lookups in map(Lookups._make, spool):
        chosen = [keys[place] for place in lookups.place.tolist()]
        begins = lookups.step_starts
        ends = [*begins[1:].tolist(), lookups.lookup_count]
        is_decode = lookups.is_decode[begins].tolist()
        for begin, end, decodes in zip(begins.tolist(), ends, is_decode, strict=True):
            yield decodes, chosen[begin:end]
