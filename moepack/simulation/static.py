"""Static caches: what would hit if some experts were held from the start and none given up."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moepack.caching.cache import Tally
from moepack.simulation.lookups import Lookups
from moepack.simulation.spool import Spool
from moepack.trace.model import Ints


def held_out(
    spool: Spool, lengths: Ints, budgets: Sequence[int], decode_token_count: int
) -> list[Tally]:
    """Learn on the first half of the decoded tokens what to hold; measure on the second.

    `lengths` are by place. One tally for each budget.
    """
    counts = np.zeros(len(lengths), np.int64)
    half = decode_token_count // 2
    for learned, _ in _halves(spool, half):
        np.add.at(counts, learned.place, learned.chosen_count)
    held = [_hottest(counts, lengths, budget) for budget in budgets]
    tallies = [Tally() for _ in budgets]
    for _, measured in _halves(spool, half):
        for tally, is_held in zip(tallies, held, strict=True):
            _count(tally, measured, is_held, lengths)
    return tallies


def prompt_alone(spool: Spool, lengths: Ints, budgets: Sequence[int]) -> tuple[list[Tally], int]:
    """Learn what to hold from each request's prompt alone; measure on what it decodes.

    Returns one tally for each budget, and how many tokens they are of: of requests with a prompt.
    """
    tallies = [Tally() for _ in budgets]
    counts = np.zeros(len(lengths), np.int64)
    held: list[NDArray[np.bool_]] = []
    request, last_call, token_count = -1, -1, 0
    for part in _parts(spool):
        if part.request[0] != request:
            request, held = int(part.request[0]), []
            counts[:] = 0
        if not part.is_decode[0]:
            np.add.at(counts, part.place, part.chosen_count)
            held = []
        elif counts.any():
            held = held or [_hottest(counts, lengths, budget) for budget in budgets]
            for tally, is_held in zip(tallies, held, strict=True):
                _count(tally, part, is_held, lengths)
            token_count += int(np.count_nonzero(np.diff(part.call, prepend=last_call)))
            last_call = int(part.call[-1])
    return tallies, token_count


def _halves(spool: Spool, half: int) -> Iterator[tuple[Lookups, Lookups]]:
    """Yield the decode lookups of each group: those of the first `half` calls, and the others."""
    done, last = 0, -1
    for lookups in map(Lookups._make, spool):
        lookups = lookups.part(lookups.is_decode)
        is_new = np.diff(lookups.call, prepend=last) != 0
        number = done + np.cumsum(is_new)
        if lookups.lookup_count:
            done, last = int(number[-1]), int(lookups.call[-1])
        yield lookups.part(number <= half), lookups.part(number > half)


def _parts(spool: Spool) -> Iterator[Lookups]:
    """Yield the lookups of a spool in parts of one request and one phase."""
    for lookups in map(Lookups._make, spool):
        yield from lookups.divided(lookups.request, lookups.is_decode)


def _hottest(counts: Ints, lengths: Ints, budget: int) -> NDArray[np.bool_]:
    """Return by place what is held: the experts that were chosen most often, while they fit.

    Places are in the order of layers and numbers, in which those stand that are alike.
    """
    order = np.argsort(-counts, kind="stable")
    fits = np.cumsum(lengths[order]) <= budget
    is_held = np.zeros(len(counts), np.bool_)
    is_held[order[fits]] = True
    return is_held


def _count(tally: Tally, lookups: Lookups, is_held: NDArray[np.bool_], lengths: Ints) -> None:
    hits = is_held[lookups.place]
    tally.hit_count += int(np.count_nonzero(hits))
    tally.miss_count += int(np.count_nonzero(~hits))
    tally.missed_length += int(lengths[lookups.place[~hits]].sum())
