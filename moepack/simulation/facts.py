"""What a simulation says."""

from collections import Counter
from dataclasses import dataclass

LEAST_SELECTIONS = 10
"""Of an expert of an even router, in half of a trace: with less, chance decides the ranking."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What one cache would have done.

    `budget_length` is its bytes; `slots` is how many experts it holds of each layer, where that was
    asked for. Rates are shares of lookups: of decode, of decode without each expert's first lookup,
    and of prefill and decode. `bytes_per_token` are those that a decoded token misses, and
    `read_length` all that was missed, prefill's as well. None is what cannot be said: static caches
    see a part of the trace alone.
    """

    policy: str
    budget_length: int
    budget_share: float
    slots: int | None
    decode_hit_rate: float | None
    warm_hit_rate: float | None
    hit_rate: float | None
    bytes_per_token: float | None
    read_length: int | None


@dataclass(frozen=True, slots=True)
class PrefetchFacts:
    """What it is worth to read ahead what each layer used last, under LRU at a budget.

    `useful_share` is the share of decode's misses that were read ahead; bytes are those that were
    read ahead for a decoded token, rightly and in vain. None where nothing was decoded, or missing.
    """

    budget_length: int
    guessed_count: int
    useful_share: float | None
    useful_bytes_per_token: float | None
    wasted_bytes_per_token: float | None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """LRU's decode hit rate at a budget, and what it would be with an even router.

    `shared_hit_rate` is the part of it that another request had used last.
    """

    budget_length: int
    decode_hit_rate: float | None
    even_hit_rate: float | None
    shared_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What caches of experts would have done with a trace.

    `expert_length` are the bytes of all experts. `step_length` are those that a decoded token uses
    in all layers, the most of any: with less, LRU finds little. It is None where none was decoded.
    `enough_length` is the least budget with which LRU hits all but 1 % of what it hits with all
    experts in memory. `cold_share` is the share of decode lookups that are their expert's first.
    `lookups_per_expert` are those of the smaller half of the trace; `is_long_enough` says whether
    they are enough to tell experts apart. `unknown` is what the trace does not tell; `warnings`
    counts what was left out of the files, by problem.
    """

    token_count: int
    decode_token_count: int
    request_count: int
    batch_count: int | None
    session_count: int
    expert_length: int
    step_length: int | None
    enough_length: int | None
    cold_share: float | None
    lookups_per_expert: float
    is_long_enough: bool
    results: tuple[CacheFacts, ...]
    prefetches: tuple[PrefetchFacts, ...]
    curve: tuple[CurvePoint, ...]
    unknown: tuple[str, ...]
    warnings: Counter[str]
