"""The misses of a cache of experts: from a trace, from a working set, or of a uniform router."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ModelShape
from moepack.common.sizes import size_text
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.traces.simulation.facts import Simulation
from moepack.traces.simulation.simulate import simulate
from moepack.traces.spool import SpooledTrace

Source = Literal["trace", "working set", "even router"]


class WorkingSet(NamedTuple):
    """The number of experts that `window` tokens use, and of those that the tokens before did not.

    After "MoE experts on SSD" (rentry, April 2026), which calls them U and D.
    """

    expert_count: float
    new_count: float
    window: int = 128


class Misses(NamedTuple):
    """The bytes that a decoded token misses; the hit rate if it is known.

    They lie between `least` and `most`. `is_short` says that a trace is too short to tell experts
    apart, `step_length` is the most that a token of it uses.
    """

    length: float
    least: float
    most: float
    hit_rate: float | None
    source: Source
    is_short: bool = False
    step_length: int | None = None


_TRACE_SPREAD, _SHORT_SPREAD = 0.1, 0.3
"""The share by which another text of the same kind may miss more or less than a trace."""
_LEAST_SHARE = 0.4
_UNIFORM_LEAST = 0.1
"""A real router's misses over a uniform one's: with a trace of Qwen3-30B-A3B 0.41 if 15 % of the
experts fit, 0.17 with 30 %, 0.07 with half of them."""
_FORMULA_FAULTS = ((0.4, 3.1), (0.7, 2.1), (0.95, 1.6), (math.inf, 1.1))
"""By the share of U that fits: LRU's misses over the formula's at most, on three traces of 64 to
128 decoded tokens."""


def cache_misses(
    model: ModelOnMachine,
    modes: Sequence[ExecutionMode],
    trace: SpooledTrace | None,
    working_set: WorkingSet | None,
    micro_batch: int | None,
) -> list[tuple[Misses | None, Misses | None]]:
    """Return the misses of each mode's caches, in memory and in VRAM; None for no cache.

    Budgets of the same layers are simulated at once.
    """
    shape = model.weights.shape.without_mtp()
    simulated: dict[tuple[int, ...], dict[int, Misses]] = {}

    def misses(budget: int | None, layers: tuple[int, ...]) -> Misses | None:
        step, part = model.step_of(layers), shape.of_layers(layers)
        if budget is None or step is None:
            return None
        if trace is not None:
            if layers not in simulated:
                alike = [mode for mode in modes if model.cached_layers(mode) == layers]
                lengths = (length for mode in alike for length in (mode.budget, mode.vram_cache))
                budgets = sorted({length for length in lengths if length is not None})
                simulated[layers] = by_trace(trace, budgets, micro_batch, layers)
            return simulated[layers][budget]
        if working_set is None:
            return by_uniform_router(part, step, budget)
        check_working_set(shape, working_set)
        share = part.routed_count / shape.routed_count
        used, new, window = working_set
        return by_working_set(part, step, budget, WorkingSet(used * share, new * share, window))

    return [
        (misses(mode.budget, layers), misses(mode.vram_cache, layers))
        for mode in modes
        for layers in [model.cached_layers(mode)]
    ]


def by_trace(
    trace: SpooledTrace, budgets: Sequence[int], batch_count: int | None, layers: Collection[int]
) -> dict[int, Misses]:
    """Return LRFU's misses on a trace at each budget, in some layers.

    Raises what `simulate` raises, and TraceError for a trace of another model.
    """
    facts = simulate(
        trace, budgets=budgets, policies=("lrfu",), batch_count=batch_count, layers=layers
    )
    check_trace(facts, trace, layers)
    spread = _TRACE_SPREAD if facts.is_long_enough else _SHORT_SPREAD
    by_budget = {}
    for one in facts.results:
        length = one.bytes_per_token
        if length is None:
            raise RequestError("the trace has no decoded token", path=trace.paths[0])
        by_budget[one.budget_length] = Misses(
            length=length,
            least=length * (1 - spread),
            most=length * (1 + spread),
            hit_rate=one.decode_hit_rate,
            source="trace",
            is_short=not facts.is_long_enough,
            step_length=facts.step_length,
        )
    return by_budget


def check_working_set(shape: ModelShape, working_set: WorkingSet) -> None:
    """Raise RequestError for fewer experts than one token uses, or more than there are."""
    least = sum(family.experts_used or 0 for family in shape.routed.values())
    most = shape.routed_count
    if not least <= working_set.expert_count <= most:
        raise RequestError(
            "not a working set of this model",
            argument="working_set",
            expected=f"U of {least:,} (what one token uses in all layers) to {most:,}",
            found=f"{working_set.expert_count:,.10g}",
            hint="U and D count the experts of all layers together",
        )


def check_trace(facts: Simulation, trace: SpooledTrace, layers: Collection[int]) -> None:
    """Raise TraceError if a token uses far less of `layers` than one of the model does.

    Then layers are missing: it is another model's. Fewer experts a token are a setting of engines.
    """
    assert trace.shape is not None, "it was read for a model"
    families = trace.shape.without_mtp().of_layers(layers).routed.values()
    used = [family.expert_length * (family.experts_used or 0) for family in families]
    step = facts.step_length
    if used and all(used) and step is not None and step < _LEAST_SHARE * sum(used):
        raise TraceError(
            "its tokens use far less of the experts than those of this model",
            path=trace.paths[0],
            expected=f"{size_text(sum(used))} a token",
            found=size_text(step),
            hint="was it recorded on another model, or without some of the layers?",
        )


def by_working_set(
    shape: ModelShape, step_length: int, budget: int, working_set: WorkingSet
) -> Misses:
    """Return the misses by the formula of U and D: new experts, and those of U that do not fit.

    They are too few if U does not fit, and far too few below the experts of one token.
    """
    total = shape.routed_length
    mean = total / shape.routed_count
    missed = 0.0
    if budget < total:
        missed = working_set.new_count + max(0.0, working_set.expert_count - budget / mean)
    length = min(step_length, missed / working_set.window * mean)
    fitting = budget / mean / working_set.expert_count if working_set.expert_count else math.inf
    times = next(most for share, most in _FORMULA_FAULTS if fitting < share or share == math.inf)
    most = min(step_length, length * times) if budget >= step_length else step_length
    hit_rate = 1 - length / step_length if step_length else None
    return Misses(length, length, most, hit_rate, "working set")


def by_uniform_router(shape: ModelShape, step_length: int, budget: int) -> Misses:
    """Return LRU's misses if all experts are equally likely: the share that does not fit.

    Below the experts of one token, no expert is still resident when it is used again.
    """
    hit_rate = min(1.0, budget / shape.routed_length) if budget >= step_length else 0.0
    length = step_length * (1 - hit_rate)
    least = length * _UNIFORM_LEAST if budget >= step_length else length
    return Misses(length, least, length, hit_rate, "even router")


class FormulaParameters(NamedTuple):
    """The options of estimate_speed.py: bytes, bytes a second, seconds, and counts.

    The script is the published formula for experts on a drive, of "MoE experts on SSD"; parameters
    have the names of its options, with its defaults: GLM-5 in IQ4_XS on a computer with 128 GiB. It
    takes each expert that is new in a window of tokens, or does not fit, to be read once in that
    window. Its author says that this is far too little if memory is short; docs/numbers.md says by
    how much.
    """

    ram_bytes: float = 128 * 1024**3
    memory_bw_bytes_per_sec: float = 100e9
    ssd_bw_bytes_per_sec_raw: float = 7e9
    ssds_in_raid: float = 1
    dense_gpu_latency_per_token: float = 0.022
    bytes_per_expert: float = 20_054_016
    num_layers: float = 74
    experts_per_layer: float = 256
    active_per_layer: float = 8
    average_active_per_batch: float = 13_190
    average_expert_turnover_per_batch: float = 2_412
    batch_size: float = 128


_DIVISORS = {
    "memory_bw_bytes_per_sec",
    "ssd_bw_bytes_per_sec_raw",
    "ssds_in_raid",
    "bytes_per_expert",
    "batch_size",
}


@dataclass(frozen=True, slots=True)
class PublishedFacts:
    """The speed by the formula, and its parameters; the terms are seconds a token."""

    tokens_per_second: float
    dense_seconds: float
    memory_seconds: float
    drive_seconds: float
    parameters: FormulaParameters


def published_formula(**options: float) -> PublishedFacts:
    """Forecast by the published formula, with `options` as `FormulaParameters` has them.

    Raises RequestError for impossible numbers.
    """
    inputs = FormulaParameters(**options)
    for name, value in inputs._asdict().items():
        least = "more than 0" if name in _DIVISORS else "0 or more"
        if not math.isfinite(value) or value < 0 or (name in _DIVISORS and not value):
            problem = "not a possible number"
            raise RequestError(problem, place=f"--{name}", expected=least, found=value)
    no_room = max(0.0, inputs.average_active_per_batch - inputs.ram_bytes / inputs.bytes_per_expert)
    read = (inputs.average_expert_turnover_per_batch + no_room) * inputs.bytes_per_expert
    drive = read / (inputs.ssds_in_raid * inputs.ssd_bw_bytes_per_sec_raw) / inputs.batch_size
    used = inputs.active_per_layer * inputs.num_layers * inputs.bytes_per_expert
    memory = used / inputs.memory_bw_bytes_per_sec
    dense = inputs.dense_gpu_latency_per_token
    if not dense + memory + drive:
        raise RequestError("a token takes no time with these numbers")
    return PublishedFacts(1 / (dense + memory + drive), dense, memory, drive, inputs)
