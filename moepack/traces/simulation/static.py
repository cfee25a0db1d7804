"""Static caches: hits if some experts are resident from the start and none is evicted."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from moepack.traces.caching.cache import Tally
from moepack.traces.hotness.ranking import hottest_within
from moepack.traces.model import Ints
from moepack.traces.simulation.lookups import Lookups
from moepack.traces.spool import Spool


def held_out(
    spool: Spool, lengths: Ints, budgets: Sequence[int], decode_token_count: int
) -> list[Tally]:
    """Rank experts on the first half of the decoded tokens; measure hits on the second.

    `lengths` are by place. One tally for each budget.
    """
    counts = np.zeros(len(lengths), np.int64)
    half = decode_token_count // 2
    for learned, _ in _halves(spool, half):
        np.add.at(counts, learned.place, learned.token_count)
    residents = [hottest_within(counts, lengths, budget) for budget in budgets]
    tallies = [Tally() for _ in budgets]
    for _, measured in _halves(spool, half):
        for tally, is_resident in zip(tallies, residents, strict=True):
            _count(tally, measured, is_resident, lengths)
    return tallies


def prompt_alone(spool: Spool, lengths: Ints, budgets: Sequence[int]) -> tuple[list[Tally], int]:
    """Rank experts on each request's prompt alone; measure hits on its decoded tokens.

    Returns one tally for each budget, and the count of measured tokens: of requests with a prompt.
    """
    tallies = [Tally() for _ in budgets]
    counts = np.zeros(len(lengths), np.int64)
    residents: list[NDArray[np.bool_]] = []
    request, last_call, token_count = -1, -1, 0
    groups = map(Lookups._make, spool)
    for part in chain.from_iterable(one.divided(one.request, one.is_decode) for one in groups):
        if part.request[0] != request:
            request, residents = int(part.request[0]), []
            counts[:] = 0
        if not part.is_decode[0]:
            np.add.at(counts, part.place, part.token_count)
            residents = []
        elif counts.any():
            residents = residents or [hottest_within(counts, lengths, budget) for budget in budgets]
            for tally, is_resident in zip(tallies, residents, strict=True):
                _count(tally, part, is_resident, lengths)
            token_count += int(np.count_nonzero(np.diff(part.call, prepend=last_call)))
            last_call = int(part.call[-1])
    return tallies, token_count


def _halves(spool: Spool, half: int) -> Iterator[tuple[Lookups, Lookups]]:
    """Yield the decode lookups of each group: of the first `half` calls, and of later ones."""
    done, last = 0, -1
    for lookups in map(Lookups._make, spool):
        lookups = lookups.part(lookups.is_decode)
        is_new = np.diff(lookups.call, prepend=last) != 0
        number = done + np.cumsum(is_new)
        if lookups.lookup_count:
            done, last = int(number[-1]), int(lookups.call[-1])
        yield lookups.part(number <= half), lookups.part(number > half)


def _count(tally: Tally, lookups: Lookups, is_resident: NDArray[np.bool_], lengths: Ints) -> None:
    hits = is_resident[lookups.place]
    tally.hit_count += int(np.count_nonzero(hits))
    tally.miss_count += int(np.count_nonzero(~hits))
    tally.missed_length += int(lengths[lookups.place[~hits]].sum())
