"""What a cache of experts will miss: from a trace, from a working set, or of an even router."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from moepack.errors import RequestError, TraceError
from moepack.shape import ModelShape
from moepack.simulation.facts import Simulation
from moepack.simulation.simulate import simulate
from moepack.sizes import size_text
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
    """What a decoded token misses at a budget, in bytes; the hit rate where it is known.

    `least` and `most` are between which it will lie. `is_short` says that a trace is too short to
    tell experts apart, `step_length` what a token of it uses at most.
    """

    budget: int
    length: float
    least: float
    most: float
    hit_rate: float | None
    source: Source
    is_short: bool = False
    step_length: int | None = None


_TRACE_DOUBT, _SHORT_DOUBT = 0.1, 0.3
"""By what share another text of the same kind may miss more or less than a trace."""
_LEAST_SHARE = 0.4
_EVEN_LEAST = 0.1
"""Of what an even router misses, a real one: with a trace of Qwen3-30B-A3B 0.41 where 15 % of the
experts have room, 0.17 with 30 %, 0.07 with half of them."""
_FORMULA_FAULTS = ((0.4, 3.1), (0.7, 2.1), (0.95, 1.6), (math.inf, 1.1))
"""By the share of U that has room: how many times the formula's misses LRU's are at most, on three
traces of 64 to 128 decoded tokens."""


def by_trace(
    paths: Sequence[str],
    budgets: Sequence[int],
    options: ReadOptions,
    batch_count: int | None,
    layers: Collection[int] | None = None,
) -> list[Misses]:
    """Return what LRU misses of traces, in some layers or in all.

    Raises what `simulate` raises, and TraceError for a trace of another model.
    """
    facts = simulate(
        paths,
        budgets=budgets,
        policies=("lru",),
        batch_count=batch_count,
        layers=layers,
        options=options,
    )
    shape = options.shape
    if shape is not None and layers is not None:
        shape = shape.of_layers(layers)
    check_trace(facts, shape, paths[0])
    found = {}
    for one in facts.results:
        if one.bytes_per_token is None:
            raise RequestError("the trace has no decoded token", path=paths[0])
        length, doubt = one.bytes_per_token, _TRACE_DOUBT if facts.is_long_enough else _SHORT_DOUBT
        found[one.budget_length] = Misses(
            *(one.budget_length, length, length * (1 - doubt), length * (1 + doubt)),
            *(one.decode_hit_rate, "trace", not facts.is_long_enough, facts.step_length),
        )
    return [found[budget] for budget in budgets]


def check_working_set(shape: ModelShape, known: WorkingSet) -> None:
    """Raise RequestError for fewer experts than one token uses, or more than there are."""
    least = sum(family.experts_used or 0 for family in shape.routed.values())
    most = shape.routed_count
    if not least <= known.expert_count <= most:
        raise RequestError(
            "not a working set of this model",
            argument="working_set",
            expected=f"U of {least:,} (what one token uses in all layers) to {most:,}",
            found=f"{known.expert_count:,.10g}",
            hint="U and D count the experts of all layers together",
        )


def check_trace(facts: Simulation, shape: ModelShape | None, path: str) -> None:
    """Raise TraceError where a token uses far less than what one of the model uses.

    Then layers are missing: it is another model's. Fewer experts a token are a setting of engines.
    """
    used = [
        family.expert_length * (family.experts_used or 0)
        for family in (shape.routed.values() if shape is not None else ())
    ]
    step = facts.step_length
    if used and all(used) and step is not None and step < _LEAST_SHARE * sum(used):
        raise TraceError(
            "a token uses far less of the experts than one of this model does",
            path=path,
            expected=f"{size_text(sum(used))} a token",
            found=size_text(step),
            hint="was it taken on another model, or without some of the layers?",
        )


def by_working_set(shape: ModelShape, step_length: int, budget: int, known: WorkingSet) -> Misses:
    """Say what is missed by the formula of U and D: what is new, and what of U has no room.

    It says too little where U has no room, and far too little with less than a token uses.
    """
    total = shape.routed_length
    mean = total / shape.routed_count
    missed = 0.0
    if budget < total:
        missed = known.new_count + max(0.0, known.expert_count - budget / mean)
    length = min(step_length, missed / known.window * mean)
    room = budget / mean / known.expert_count if known.expert_count else math.inf
    times = next(times for share, times in _FORMULA_FAULTS if room < share or share == math.inf)
    most = min(step_length, length * times) if budget >= step_length else step_length
    hit_rate = 1 - length / step_length if step_length else None
    return Misses(budget, length, length, most, hit_rate, "working set")


def by_even_router(shape: ModelShape, step_length: int, budget: int) -> Misses:
    """Say what LRU misses if all experts are chosen alike: as much as has no room.

    With less than what a token uses, nothing is still there when it is used again.
    """
    hit_rate = min(1.0, budget / shape.routed_length) if budget >= step_length else 0.0
    length = step_length * (1 - hit_rate)
    least = length * _EVEN_LEAST if budget >= step_length else length
    return Misses(budget, length, least, length, hit_rate, "even router")
