"""The misses of a cache of experts: from a trace, or by the curve of a model that was traced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ModelShape
from moepack.common.sizes import size_text
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.traces.simulation.facts import Simulation
from moepack.traces.simulation.simulate import simulate
from moepack.traces.spool import SpooledTrace

Source = Literal["trace", "curve"]


_CURVE = "Qwen3-30B-A3B"
"""LRFU's misses in decoding by the room for experts, between those of one token (0) and all of them
(1): simulated with the trace that github.com/Helldez/BigMoeOnEdge published (Apache-2.0)."""
_CURVE_SHAPE = (48, 128)
"""Its layers and experts."""
_ROOMS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0)
_MISSES = (0.621, 0.423, 0.31, 0.231, 0.169, 0.121, 0.09, 0.05, 0.032, 0.0)
_FACTOR = 1.15
"""Published misses of LRU on five models are 0.93 to 1.4 times LRU's on that trace."""


class HitCurve(NamedTuple):
    """The curve of a model that was traced, for others.

    A text misses up to `spread` times as much or as little. `is_own` is whether it was simulated
    for a model of the same shape.
    """

    name: str
    spread: float
    is_own: bool

    def share(self, step_length: int, total_length: int, budget: int) -> float:
        """Return the share that misses in a cache of `budget` bytes, all in bytes."""
        if budget < step_length:
            return 1 - (1 - _FACTOR * _MISSES[0]) * budget / step_length
        room = (budget - step_length) / max(1, total_length - step_length)
        return _FACTOR * float(np.interp(room, _ROOMS, _MISSES))


def curve_for(shape: ModelShape) -> HitCurve:
    """Return the curve for a model of this shape."""
    is_own = (len(shape.expert_counts), max(shape.expert_counts.values())) == _CURVE_SHAPE
    return HitCurve(_CURVE, 1.3 if is_own else 1.6, is_own)


class Misses(NamedTuple):
    """The bytes that a token of each text misses; the hit rate if it is known.

    They lie between `least` and `most`. `curve` is the one that they follow. If a trace is too
    short to tell experts apart, `needed_token_count` tokens are not; `step_length` is the most that
    a token of it uses.
    """

    length: float
    least: float
    most: float
    hit_rate: float | None
    source: Source
    curve: HitCurve | None = None
    needed_token_count: int | None = None
    step_length: int | None = None

    def times(self, factor: float) -> Misses:
        """Return those of so many times as many lookups."""
        length, least, most = (factor * one for one in self[:3])
        return self._replace(length=length, least=least, most=most)


_TRACE_SPREAD, _SHORT_SPREAD = 0.1, 0.3
"""The share by which another text of the same kind may miss more or less than a trace."""
_LEAST_SHARE = 0.4


def cache_misses(
    model: ModelOnMachine,
    modes: Sequence[ExecutionMode],
    trace: SpooledTrace | None,
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
        if trace is None:
            return by_curve(shape, layers, step, budget)
        of_one = step if model.text_count == 1 else model.step_of(layers, 1) or step
        if layers not in simulated:
            alike = [mode for mode in modes if model.cached_layers(mode) == layers]
            lengths = (length for mode in alike for length in (mode.budget, mode.vram_cache))
            least = max(model.step_of([layer], 1) or 0 for layer in layers)
            budgets = {
                length: max(least, _of_one(length, step, of_one, part.routed_length))
                for length in lengths
                if length is not None
            }
            results = by_trace(trace, sorted({*budgets.values()}), micro_batch, layers)
            simulated[layers] = {length: results[one] for length, one in budgets.items()}
        return simulated[layers][budget].times(step / of_one)

    return [
        (misses(mode.budget, layers), misses(mode.vram_cache, layers))
        for mode in modes
        for layers in [model.cached_layers(mode)]
    ]


def _of_one(budget: int, step: int, step_of_one: int, total: int) -> int:
    """Return the budget in which one text misses as large a share as several do in `budget`.

    It is as far between the experts of a step and all of them, or from none to those of a step.
    """
    if budget <= step or step >= total:
        return round(budget * step_of_one / step)
    room = (budget - step) / (total - step)
    return round(step_of_one + room * (total - step_of_one))


def by_trace(
    trace: SpooledTrace,
    budgets: Sequence[int],
    batch_count: int | None,
    layers: Collection[int],
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
            needed_token_count=facts.needed_token_count,
            step_length=facts.step_length,
        )
    return by_budget


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


def by_curve(model: ModelShape, layers: Collection[int], step_length: int, budget: int) -> Misses:
    """Return the misses of some layers of a model whose routing is not known, by a kept curve."""
    total, curve = model.of_layers(layers).routed_length, curve_for(model)
    share = curve.share(step_length, total, budget)
    uniform = max(0.0, 1 - budget / total) if budget >= step_length else 1.0
    most = max(share, min(share * curve.spread, uniform))
    length, least, most = (step_length * one for one in (share, share / curve.spread, most))
    return Misses(length, least, most, 1 - share, "curve", curve)
