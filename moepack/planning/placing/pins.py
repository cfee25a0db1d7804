"""Pinning of single experts: whether it is worth more than keeping the latest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from moepack.common.keys import ExpertKey
from moepack.common.shape import ModelShape
from moepack.planning.forecasting.misses import check_trace
from moepack.planning.placing.facts import PinFacts
from moepack.traces.analysis.concentration import concentration
from moepack.traces.analysis.verdict import CLEAR
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness import measure
from moepack.traces.hotness.model import Hotness
from moepack.traces.hotness.ranking import covered_count
from moepack.traces.simulation.simulate import simulate


def pins_by_trace(
    traces: Sequence[str], shape: ModelShape, budget: int, most: int, layers: Collection[int]
) -> PinFacts:
    """Judge by traces whether to pin up to `most` bytes of a budget.

    Experts of `layers` alone are cached. Raises what `simulate` and `concentration` raise, and
    TraceError for a trace of another model.
    """
    options = ReadOptions(shape=shape)
    gate = concentration(traces, options)
    facts = simulate(
        traces, budgets=[budget], policies=("lru", "static"), layers=layers, options=options
    )
    check_trace(facts, shape.of_layers(layers), traces[0])
    rates = {one.policy: one.decode_hit_rate for one in facts.results}
    return judge(gate.verdict, gate.reason, rates["static"], rates["lru"], most)


def pins_by_hotness(
    path: str, shape: ModelShape, budget: int, most: int, layers: Collection[int]
) -> PinFacts:
    """Judge by hotness, without the hits of an LRU cache. Raises as reading it does."""
    gate = concentration([path], ReadOptions(shape=shape))
    coverage = held_out_coverage(measure.load(path, shape), shape.of_layers(layers), budget)
    return judge(gate.verdict, gate.reason, coverage, None, most)


def judge(
    verdict: str, reason: str, static: float | None, lru: float | None, most: int
) -> PinFacts:
    """Return whether pinning is worth it: by the gate, and unless LRU hits nearly as much."""
    is_worth_it = verdict == "static" and not (
        static is not None and lru is not None and lru > static - CLEAR
    )
    return PinFacts(verdict, reason, static, lru, max(0, most) if is_worth_it else 0)


def held_out_coverage(hotness: Hotness, shape: ModelShape, budget: int) -> float | None:
    """Return the share of the held-out selections that the hottest experts that fit cover.

    None if nothing is held out: by the counts that rank them, experts always look better.
    """
    if hotness.held_out is None:
        return None
    learned = hotness.learned()
    table = [
        (learned.get(key, 0), hotness.held_out.counts.get(key, 0), family.expert_length)
        for layer, family in sorted(shape.routed.items())
        for key in (ExpertKey(layer, expert) for expert in range(family.expert_count))
    ]
    counts, held_out, lengths = np.array(table, np.int64).reshape(-1, 3).T
    total = int(held_out.sum())
    return covered_count(counts, held_out, lengths, budget) / total if total else None
