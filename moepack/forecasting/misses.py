"""What a cache of experts will miss: from a trace, from a working set, or of an even router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from moepack.errors import RequestError
from moepack.shape import ModelShape
from moepack.simulation.simulate import simulate
from moepack.trace.formats.registry import ReadOptions

Source = Literal["trace", "working set", "even router"]


class WorkingSet(NamedTuple):
    """How many experts `window` tokens use, and how many of these the tokens before did not.

    After "MoE experts on SSD" (rentry, April 2026), which calls them U and D.
    """

    expert_count: float
    new_count: float
    window: int = 128


class Misses(NamedTuple):
    """What a decoded token misses at a budget, in bytes; the hit rate where it is known."""

    budget: int
    length: float
    hit_rate: float | None
    source: Source


def by_trace(
    paths: Sequence[str], budgets: Sequence[int], options: ReadOptions, batch_count: int | None
) -> list[Misses]:
    """Say what LRU misses of traces. Raises what `simulate` raises."""
    facts = simulate(
        paths, budgets=budgets, policies=("lru",), batch_count=batch_count, options=options
    )
    found = {}
    for one in facts.results:
        if one.bytes_per_token is None:
            raise RequestError("the trace has no decoded token", path=paths[0])
        misses = Misses(one.budget_length, one.bytes_per_token, one.decode_hit_rate, "trace")
        found[one.budget_length] = misses
    return [found[budget] for budget in budgets]


def by_working_set(shape: ModelShape, step_length: int, budget: int, known: WorkingSet) -> Misses:
    """Say what is missed by the formula of U and D: what is new, and what of U has no room.

    It holds where U has room. With less it says too little, with less than a token uses far too
    little: nothing can say that fewer than all experts miss there, and it does.
    """
    routed = shape.routed.values()
    expert_count = sum(family.expert_count for family in routed)
    total = sum(family.expert_count * family.expert_length for family in routed)
    mean = total / expert_count
    if budget >= total:
        return Misses(budget, 0.0, 1.0, "working set")
    missed = known.new_count + max(0.0, known.expert_count - budget / mean)
    length = min(step_length, missed / known.window * mean)
    hit_rate = 1 - length / step_length if step_length else None
    return Misses(budget, length, hit_rate, "working set")


def by_even_router(shape: ModelShape, step_length: int, budget: int) -> Misses:
    """Say what LRU misses if all experts are chosen alike: as much as has no room.

    With less than what a token uses, nothing is still there when it is used again.
    """
    routed = shape.routed.values()
    total = sum(family.expert_count * family.expert_length for family in routed)
    hit_rate = min(1.0, budget / total) if budget >= step_length else 0.0
    return Misses(budget, step_length * (1 - hit_rate), hit_rate, "even router")
