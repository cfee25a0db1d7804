"""The section about concentration: the hottest experts' share of later tokens."""

from __future__ import annotations

import math
from typing import Any

from moepack.report.html.drawing import COLOURS, draw, percent_axis
from moepack.report.html.facts import ReportFacts, RoutingFacts
from moepack.report.html.section import DataTable, Key, MissingSection, PageSection, Picture
from moepack.report.table import Column, Table
from moepack.report.values import share_text
from moepack.traces.analysis.verdict import GATE_PERCENT

TITLE = "What the hottest experts cover"
_LOOKS = (
    ("learned on the earlier half", Key("held out: learned earlier, measured later", "c1")),
    ("ranked and measured", Key("ranked on the same tokens (looks better)", "c1", "dotted")),
    ("learned on every other", Key("learned on every other request", "c3", "dashed")),
    ("LRU", Key("LRU cache of as many experts", "c2")),
    ("uniform", Key("uniform router", "muted", "dashed")),
)
"""The looks of the curves, by the beginnings of their names."""
LINES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5))}


def coverage_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the coverage of the hottest experts on held-out tokens, beside a uniform router's."""
    routing = facts.routing
    if routing is None:
        reason = "that takes tokens, half of them held out; "
        return MissingSection(
            TITLE, reason + "`moepack report MODEL --trace FILE -o report.html` adds it"
        )
    judged = routing.concentration
    curves = [(key, routing.curves[name]) for name, key in _named(routing)]
    top = next(one for one in judged.total.coverage if one.percent == GATE_PERCENT)
    figure = Picture(
        "coverage",
        "Selections covered, by the share of experts kept",
        "Curves that rise from nothing to everything: " + judged.reason + ".",
        draw("coverage", (3.3, 3.3), lambda figure: _paint(figure, curves)),
        keys=tuple(key for key, _ in curves),
        pointer=_pointer(curves),
    )
    headline: tuple[tuple[str, str], ...] = ()
    if top.share is not None and judged.verdict != "small":
        label = f"of later selections covered by the top {GATE_PERCENT} %"
        headline = ((share_text(top.share), f"{label}; uniform: {share_text(top.even_share)}"),)
    unknown = []
    if judged.halves is None:
        unknown.append("Nothing could be held out: there are counts alone, or a single token.")
    elif judged.verdict == "small":
        unknown.append("The sample is too small for a verdict.")
    return PageSection(
        name="coverage",
        title=TITLE,
        sentence=f"{judged.reason[0].upper()}{judged.reason[1:]}.",
        figures=(figure,),
        tables=(_tops(routing),),
        unknown=tuple(unknown),
        headline=headline,
    )


def _named(routing: RoutingFacts) -> list[tuple[str, Key]]:
    """Return the names of the curves with their looks, the most important first."""
    return [
        (name, key) for start, key in _LOOKS for name in routing.curves if name.startswith(start)
    ]


def _paint(figure: Any, curves: list[tuple[Key, list[float]]]) -> Any:
    axis = figure.add_subplot()
    for key, curve in reversed(curves):
        steps = [n / (len(curve) - 1) for n in range(len(curve))]
        axis.plot(steps, curve, color=COLOURS[key.colour], linestyle=LINES[key.look])
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    percent_axis(axis)
    axis.set_xlabel("experts of each layer")
    axis.set_ylabel("selections covered")
    return axis


def _pointer(curves: list[tuple[Key, list[float]]]) -> dict[str, Any]:
    count = len(curves[0][1])
    lines = []
    for number in range(count):
        shares = (
            f"{key.label}: {share_text(None if math.isnan(curve[number]) else curve[number])}"
            for key, curve in curves
        )
        lines.append("\n".join([f"top {number / (count - 1):.0%} of the experts", *shares]))
    return {"kind": "points", "at": [n / (count - 1) for n in range(count)], "lines": list(lines)}


def _tops(routing: RoutingFacts) -> DataTable:
    rows = [
        (
            f"{top.percent} %",
            f"{top.expert_count:,}",
            share_text(top.share),
            share_text(top.even_share),
            share_text(top.interleaved_share),
            share_text(top.latest_share),
        )
        for top in routing.concentration.total.coverage
    ]
    names = ("top", "experts", "held out", "uniform", "other requests", "LRU")
    return DataTable("Coverage of the top experts", Table(tuple(map(Column, names)), rows))
