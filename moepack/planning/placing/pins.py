"""Pinning of single experts: whether it is worth more than keeping the latest."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moepack.common.paths import AnyPath
from moepack.common.shape import ExpertKey, ModelShape
from moepack.planning.forecasting.misses import check_trace
from moepack.planning.placing.facts import PinFacts
from moepack.traces.analysis.concentration import Concentration, RoutingSample
from moepack.traces.analysis.gate import CLEAR
from moepack.traces.hotness import measure
from moepack.traces.hotness.counter import covered_count
from moepack.traces.hotness.file import items_of
from moepack.traces.hotness.model import Hotness
from moepack.traces.simulation.simulate import simulate
from moepack.traces.spool import SpooledTrace


def judge_hotness(hotness: AnyPath | Hotness, shape: ModelShape) -> tuple[Hotness, Concentration]:
    """Read hotness from a file, once, and return the concentration gate on its counts too.

    Raises as reading it does, and TraceError if it is another model's.
    """
    sample = RoutingSample(shape.without_mtp())
    if isinstance(hotness, Hotness):
        for item in items_of(hotness):
            sample.add(item)
    else:
        hotness = measure.load(hotness, shape, sample.add)
    hotness.check_fits(shape)
    sample.path = hotness.path
    return hotness, sample.concentration()


def pins_by_trace(trace: SpooledTrace, budget: int, most: int, layers: Collection[int]) -> PinFacts:
    """Judge by a trace whether to pin up to `most` bytes of a budget.

    Experts of `layers` alone are cached. Raises what `simulate` and `concentration` raise, and
    TraceError for a trace of another model.
    """
    assert trace.shape is not None, "it was read for a model"
    sample = RoutingSample(trace.shape.without_mtp())
    trace.feed(sample.add)
    gate = sample.concentration()
    facts = simulate(trace, budgets=[budget], policies=("lrfu", "static"), layers=layers)
    check_trace(facts, trace, layers)
    rates = {one.policy: one.decode_hit_rate for one in facts.results}
    return judge(gate.verdict, gate.reason, rates["static"], rates["lrfu"], most)


def pins_by_hotness(
    judged: tuple[Hotness, Concentration],
    shape: ModelShape,
    budget: int,
    most: int,
    layers: Collection[int],
) -> PinFacts:
    """Judge by hotness, without the hits of an LRFU cache."""
    hotness, gate = judged
    coverage = held_out_coverage(hotness, shape.of_layers(layers), budget)
    return judge(gate.verdict, gate.reason, coverage, None, most)


def judge(
    verdict: str, reason: str, static: float | None, lrfu: float | None, most: int
) -> PinFacts:
    """Return whether pinning is worth it: by the gate, and unless LRFU hits nearly as much."""
    is_worth_it = verdict == "static" and not (
        static is not None and lrfu is not None and lrfu > static - CLEAR
    )
    return PinFacts(verdict, reason, static, lrfu, max(0, most) if is_worth_it else 0)


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
