"""The results of a simulation."""

import math
from collections import Counter
from dataclasses import dataclass

LEAST_SELECTIONS = 10
"""Selections of an expert in half of a trace, by a uniform router; with fewer, chance ranks."""


def needed_tokens(token_count: int, per_expert: float) -> int | None:
    """Return how many tokens like these have LEAST_SELECTIONS an expert, rounded to two digits.

    `per_expert` are those of these tokens. None if these are enough, or have none.
    """
    if not 0 < per_expert < LEAST_SELECTIONS:
        return None
    needed = math.ceil(token_count * LEAST_SELECTIONS / per_expert)
    unit: int = 10 ** max(0, len(str(needed)) - 2)
    return -(-needed // unit) * unit


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The hits and misses of one cache.

    `budget_length` is in bytes. Rates are shares of lookups: of decode, of decode without each
    expert's first lookup, and of prefill and decode. A decoded token misses `bytes_per_token`;
    `read_length` is all missed bytes, those of prefill too. None is unknown: static caches see a
    part of the trace alone.
    """

    policy: str
    budget_length: int
    budget_share: float
    decode_hit_rate: float | None
    warm_hit_rate: float | None
    hit_rate: float | None
    bytes_per_token: float | None
    read_length: int | None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """LRU's decode hit rate at a budget, and the same with a uniform router (`even_hit_rate`)."""

    budget_length: int
    decode_hit_rate: float | None
    even_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of expert caches on a trace.

    `expert_length` is the bytes of all experts. A decoded token uses at most `step_length` of them
    in all layers: with less, LRU finds little. It is None if no token was decoded. With
    `enough_length` LRU hits all but 1 % of the lookups it hits with all experts in memory.
    `cold_share` is the share of decode lookups that are their expert's first. There are
    `lookups_per_expert` in half of the trace; `is_long_enough` says whether they tell experts
    apart, and `needed_token_count` is about how many tokens do, None if these do. The trace does
    not tell `unknown` facts; `warnings` counts the left-out parts of files, by problem.
    """

    token_count: int
    decode_token_count: int
    request_count: int
    batch_count: int | None
    expert_length: int
    step_length: int | None
    enough_length: int | None
    cold_share: float | None
    lookups_per_expert: float
    is_long_enough: bool
    needed_token_count: int | None
    results: tuple[CacheFacts, ...]
    curve: tuple[CurvePoint, ...]
    unknown: tuple[str, ...]
    warnings: Counter[str]
