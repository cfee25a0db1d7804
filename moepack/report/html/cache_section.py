"""The section about caches: hit rates of policies by memory, the miss-ratio curves turned over."""

from __future__ import annotations

import math
from typing import Any

from moepack.common.sizes import size_text
from moepack.report import simulation_text
from moepack.report.html.coverage_section import LINES
from moepack.report.html.drawing import COLOURS, INK, MUTED, draw, gib_axis, percent_axis
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, MissingSection, PageSection, Picture
from moepack.report.table import Column, Table
from moepack.report.values import length_text, share_text, tokens_text
from moepack.traces.simulation.facts import CacheFacts, Simulation

TITLE = "Hit rates of caches"
_LRU = Key("LRU", "c1")
_EVEN = Key("LRU, uniform router", "muted", "dashed")
_POLICIES = {
    "belady": Key("belady (knows the future)", "c3", "dashed"),
    "static": Key("static, held out", "c2"),
    "lfu": Key("LFU", "c4"),
    "s3fifo": Key("S3-FIFO", "c5", "dotted"),
}
"""The policies that are drawn; the table has all."""


def cache_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the hit rates of caches by their budgets, with the requested budget marked."""
    simulation = facts.simulation
    if simulation is None:
        problem = facts.problems.get("caches", "that takes the order of tokens, in a trace")
        return MissingSection(
            TITLE, f"{problem}; `moepack report MODEL --trace FILE -o report.html` adds it"
        )
    budget = facts.budget_length
    curves = dict(_curves(simulation))
    keys = (_LRU, *(_POLICIES[name] for name in curves), _EVEN)
    figure = Picture(
        "caches",
        "Hit rate in decoding, by memory for experts",
        f"Curves that rise with memory: {_sentence(facts)}",
        draw("caches", (3.4, 3.4), lambda figure: _paint(figure, simulation, curves, budget)),
        keys=keys,
        pointer=_pointer(simulation, budget),
    )
    tables = [
        DataTable("By budget and policy", simulation_text.hit_rates(simulation), place="below")
    ]
    if facts.at_budget is not None:
        tables.insert(0, _policies(facts.at_budget))
    lru = _lru_at(facts.at_budget)
    headline: tuple[tuple[str, str], ...] = ()
    if lru is not None and budget is not None:
        label = (
            f"hits of LRU in {size_text(budget)}, over {tokens_text(simulation.decode_token_count)}"
        )
        headline = ((share_text(lru.decode_hit_rate), label),)
    return PageSection(
        name="caches",
        title=TITLE,
        sentence=_sentence(facts),
        figures=(figure,),
        tables=tuple(tables),
        blocks=tuple(simulation_text.notes(simulation)),
        unknown=_unknown(simulation, budget),
        headline=headline,
    )


def _sentence(facts: ReportFacts) -> str:
    simulation, lru = facts.simulation, _lru_at(facts.at_budget)
    assert simulation is not None
    parts = []
    if lru is not None:
        parts.append(
            f"in {length_text(facts.budget_length)} LRU hits {share_text(lru.decode_hit_rate)} of "
            f"the lookups, and a token reads {length_text(lru.bytes_per_token)}"
        )
    if simulation.enough_length is not None:
        parts.append(
            f"with {size_text(simulation.enough_length)} LRU has all but 1 % of the hits that it "
            f"has with all {size_text(simulation.expert_length)} in memory"
        )
    else:
        parts.append(f"all experts take {size_text(simulation.expert_length)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _lru_at(simulation: Simulation | None) -> CacheFacts | None:
    results = () if simulation is None else simulation.results
    return next((one for one in results if one.policy == "lru"), None)


def _policies(simulation: Simulation) -> DataTable:
    """Write the policies at one budget, the best first."""
    results = sorted(simulation.results, key=lambda one: -(one.decode_hit_rate or 0))
    rows = [
        (one.policy, share_text(one.decode_hit_rate), length_text(one.bytes_per_token))
        for one in results
    ]
    columns = (Column("policy", "l"), Column("hits"), Column("reads a token"))
    caption = f"In {size_text(simulation.results[0].budget_length)}"
    return DataTable(caption, Table(columns, rows))


def _curves(simulation: Simulation) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the budgets and hit rates of the other policies that are drawn."""
    curves = []
    for policy in _POLICIES:
        points = sorted(
            (one.budget_length, one.decode_hit_rate)
            for one in simulation.results
            if one.policy == policy and one.slots is None and one.decode_hit_rate is not None
        )
        if points:
            curves.append((policy, points))
    return curves


def _paint(
    figure: Any,
    simulation: Simulation,
    curves: dict[str, list[tuple[int, float]]],
    budget: int | None,
) -> Any:
    axis = figure.add_subplot()
    lines: list[tuple[Key, list[tuple[int, float | None]]]]
    lines = [(_EVEN, [(one.budget_length, one.even_hit_rate) for one in simulation.curve])]
    lines += [(_POLICIES[name], [*points]) for name, points in reversed(curves.items())]
    lines.append((_LRU, [(one.budget_length, one.decode_hit_rate) for one in simulation.curve]))
    for key, points in lines:
        gibs = [length / (1 << 30) for length, _ in points]
        rates = [float("nan") if rate is None else rate for _, rate in points]
        width = 2.4 if key is _LRU else 1.4
        look = LINES[key.look]
        axis.plot(gibs, rates, color=COLOURS[key.colour], linestyle=look, linewidth=width)
    gib_axis(axis, [one.budget_length for one in simulation.curve])
    percent_axis(axis)
    marks = [
        (simulation.step_length, "one token", MUTED),
        (budget, f"budget {length_text(budget)}", INK),
    ]
    for length, label, colour in marks:
        if length is not None:
            place = length / (1 << 30)
            axis.axvline(place, color=colour, linewidth=1, linestyle=LINES["dotted"])
            side = "left" if length is simulation.step_length else "center"
            systems = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axis.annotate(label, (place, 1), xytext=(0, 4), ha=side, color=colour, **systems)
    axis.set_xlabel("memory for experts")
    axis.set_ylabel("lookups that hit")
    return axis


def _pointer(simulation: Simulation, budget: int | None) -> dict[str, Any]:
    lengths = [one.budget_length for one in simulation.curve]
    first, last = math.log(min(lengths)), math.log(max(lengths))
    span = last - first or 1.0
    lines = [
        f"{size_text(one.budget_length)}, {one.budget_length / simulation.expert_length:.0%} of "
        f"all experts\nLRU: {share_text(one.decode_hit_rate)}\n"
        f"uniform router: {share_text(one.even_hit_rate)}"
        for one in simulation.curve
    ]
    at: list[Any] = [round((math.log(length) - first) / span, 5) for length in lengths]
    return {"kind": "points", "at": at, "lines": list(lines)}


def _unknown(simulation: Simulation, budget: int | None) -> tuple[str, ...]:
    lines = []
    if budget is None:
        lines.append(
            "No budget was named: `moepack report MODEL --budget 8GiB -o report.html` marks one."
        )
    lines += (f"{line[0].upper()}{line[1:]}." for line in simulation_text.doubts(simulation))
    if simulation.unknown:
        lines.append(f"The trace does not tell: {', '.join(simulation.unknown)}.")
    return tuple(lines)
