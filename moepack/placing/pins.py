"""Single experts in memory for good: whether that is worth more than to keep the latest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moepack.analysis.concentration import concentration
from moepack.analysis.verdict import CLEAR
from moepack.forecasting.misses import check_trace
from moepack.hotness import measure
from moepack.hotness.model import Hotness
from moepack.keys import ExpertKey
from moepack.placing.facts import PinFacts
from moepack.shape import ModelShape
from moepack.simulation.simulate import simulate
from moepack.trace.formats.registry import ReadOptions


def pins_by_trace(
    traces: Sequence[str], shape: ModelShape, budget: int, room: int, layers: Collection[int]
) -> PinFacts:
    """Judge by traces what pinning is worth at a budget, of which up to `room` may be pinned.

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
    return _judged(gate.verdict, gate.reason, rates["static"], rates["lru"], room)


def pins_by_hotness(
    path: str, shape: ModelShape, budget: int, room: int, layers: Collection[int]
) -> PinFacts:
    """Judge by hotness, which does not know what an LRU cache would do.

    Raises what reading it raises.
    """
    gate = concentration([path], ReadOptions(shape=shape))
    hotness = measure.load(path, shape)
    covered = _covered(hotness, shape.of_layers(layers), budget)
    return _judged(gate.verdict, gate.reason, covered, None, room)


def _judged(
    verdict: str, reason: str, static: float | None, lru: float | None, room: int
) -> PinFacts:
    is_worth_it = verdict == "static" and not (
        static is not None and lru is not None and lru > static - CLEAR
    )
    return PinFacts(verdict, reason, static, lru, max(0, room) if is_worth_it else 0)


def _covered(hotness: Hotness, shape: ModelShape, budget: int) -> float | None:
    """Return what the hottest experts that fit cover of what they were not ranked by.

    None where nothing is held out: by the counts that rank them, experts always look better.
    """
    held = hotness.held_out
    routed = shape.routed
    total = 0
    if held is not None:
        total = sum(count for key, count in held.counts.items() if key.layer in routed)
    if held is None or not total:
        return None
    learned = hotness.learned()
    lengths = {
        ExpertKey(family.layer, expert): family.expert_length
        for family in routed.values()
        for expert in range(family.expert_count)
    }
    covered = 0
    for key in sorted(lengths, key=lambda key: (-learned.get(key, 0), key)):
        budget -= lengths[key]
        if budget < 0:
            break
        covered += held.counts.get(key, 0)
    return covered / total
