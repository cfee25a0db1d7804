"""The section about concentration: the hottest experts' share of later tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moepack.report import trace_text
from moepack.report.html.drawing import line, picture, share_axis
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import Key, PageSection, Picture, adding
from moepack.report.values import share_text
from moepack.traces.analysis.gate import GATE_PERCENT

_LOOKS = {
    "learned on the earlier half": Key("held out: learned earlier, measured later", "c1"),
    "ranked and measured": Key("ranked on the same tokens (looks better)", "c1", "dotted"),
    "learned on every other": Key("learned on every other request", "c3", "dashed"),
    "LRU": Key("LRU cache of as many experts", "c2"),
    "uniform": Key("uniform router", "muted", "dashed"),
}
"""The looks of the curves, by the beginnings of their names; the most important first."""


def coverage_section(facts: ReportFacts) -> PageSection | str:
    """Draw the coverage of the hottest experts on held-out tokens, beside a uniform router's."""
    if facts.routing is None:
        return adding("that takes tokens, half of them held out", "MODEL --trace FILE")
    judged, curves = facts.routing
    top = next(one for one in judged.total.coverage if one.percent == GATE_PERCENT)
    headline: tuple[tuple[str, str], ...] = ()
    if top.share is not None and judged.verdict != "small":
        label = f"of later selections covered by the top {GATE_PERCENT} %"
        headline = ((share_text(top.share), f"{label}; uniform: {share_text(top.even_share)}"),)
    unknown = []
    if judged.halves is None:
        unknown.append("nothing could be held out: there are counts alone, or a single token")
    elif judged.verdict == "small":
        unknown.append("the sample is too small for a verdict")
    return PageSection(
        name="coverage",
        sentence=judged.reason,
        figures=(_picture(curves, judged.reason),),
        blocks=trace_text.concentration(judged).blocks[:2],  # the table and its legend
        unknown=tuple(unknown),
        headline=headline,
    )


def _picture(named: Mapping[str, list[float]], reason: str) -> Picture:
    curves = {
        key: [None if math.isnan(share) else share for share in curve]
        for start, key in _LOOKS.items()
        for name, curve in named.items()
        if name.startswith(start)
    }
    across, up = share_axis("experts of each layer"), share_axis("selections covered")
    count = max(map(len, curves.values()))
    shares = [number / (count - 1) for number in range(count)]
    lines = [
        line(across, up, key, zip(shares, curve, strict=True)) for key, curve in curves.items()
    ]
    texts = []
    for number, share in enumerate(shares):
        covered = {key.label: curve[number] for key, curve in curves.items()}
        rows = (f"{label}: {share_text(value)}" for label, value in covered.items())
        texts.append("\n".join([f"top {share:.0%} of the experts", *rows]))
    return Picture(
        "coverage",
        "Selections covered, by the share of experts kept",
        f"Curves that rise from nothing to everything: {reason}.",
        picture(15, across, up, *reversed(lines)),
        keys=tuple(curves),
        pointer={"kind": "points", "at": [*shares], "lines": [*texts]},
    )
