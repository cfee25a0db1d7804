"""The sections about routing: how often experts are used, what the hottest cover, and caches."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from moepack.common.sizes import count_text, size_text
from moepack.report import trace_text
from moepack.report.html.drawing import (
    Axis,
    cell_map,
    line,
    log_size_axis,
    mark,
    picture,
    row_ticks,
    share_axis,
)
from moepack.report.html.section import (
    CountTable,
    DataTable,
    Key,
    PageSection,
    Picture,
    Pointer,
    ReportFacts,
    adding,
    points,
)
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN, length_text, rate_text, share_text, tokens_text
from moepack.traces.analysis.gate import GATE_PERCENT
from moepack.traces.simulation.facts import Simulation


def heat_section(facts: ReportFacts) -> PageSection | str:
    """Draw the counts of all experts as a map, the hottest first."""
    table = facts.counts
    if table is None:
        reason = "neither a trace nor the pack says how often experts were selected"
        return adding(reason, "MODEL --trace FILE")
    judged = None if facts.routing is None else facts.routing.concentration
    total = int(np.maximum(table.counts, 0).sum())
    never = int((table.counts == 0).sum())
    count = int((table.counts >= 0).sum())
    tokens = None if judged is None else judged.token_count
    sample = "" if tokens is None else f" of {count_text(tokens, 'token')}"
    unknown = []
    if judged is None:
        unknown.append("counts alone say nothing of tokens that come later")
    elif not judged.has_expert_counts:
        unknown.append("the experts of a layer are assumed from the highest that was selected")
    if total < 20 * count:
        unknown.append(
            f"there are {total / max(count, 1):.1f} selections an expert: with so few, chance "
            "looks like preference, and entropy looks lower than it is"
        )
    return PageSection(
        name="heat",
        sentence=f"{count_text(total, 'selection')}{sample} by {table.origin}: {never:,} of "
        f"{count_text(count, 'expert')} were never selected",
        figures=[_heat_map(table)],
        tables=[_layers(table)],
        unknown=unknown,
    )


def _heat_map(table: CountTable) -> Picture:
    """Draw the experts of each layer, the most selected first; those that are none come last."""
    order = np.argsort(-table.counts, axis=1, kind="stable")
    counts = np.take_along_axis(table.counts, order, axis=1)
    is_there = counts >= 0
    row_count, column_count = counts.shape
    widths = np.maximum(is_there.sum(axis=1, keepdims=True), 1)
    totals = np.maximum(counts, 0).sum(axis=1, keepdims=True)
    multiples = np.maximum(counts, 0) * widths / np.maximum(totals, 1)
    most = float(multiples.max())
    levels = np.where(is_there, np.log2(1 + multiples) / np.log2(1 + max(most, 1e-9)), np.nan)
    ticks = row_ticks([*map(str, table.layers)], [row + 0.5 for row in range(row_count)])
    up = Axis("layer", row_count, 0, ticks)
    svg = cell_map(
        levels, "expert, hottest first in its layer", up, min(20, max(5, 0.23 * row_count))
    )
    experts = order.astype(object)
    experts[~is_there] = None
    columns = {
        "expert": experts,
        "layer": np.broadcast_to(np.array(table.layers)[:, None], counts.shape),
        "count": counts,
        "number": np.broadcast_to(np.arange(1, column_count + 1), counts.shape),
        "width": np.broadcast_to(widths, counts.shape),
    }
    values = {name: column.ravel().tolist() for name, column in columns.items()}
    values["multiple"] = [rate_text(multiple) for multiple in multiples.ravel().tolist()]
    text = (
        "layer {layer}, expert {expert}\n{count:,} selections, {multiple} × a uniform share\n"
        "number {number:,} of {width:,} in its layer"
    )
    about = (
        f"{row_count} rows of up to {column_count} cells, a cell for each expert, brighter with "
        "more selections. The table has figures of each layer."
    )
    pointer = Pointer(row_count, column_count, text, values)
    ramp = ("never", f"{rate_text(most)} × a uniform share")
    return Picture("heat", "Selections, hottest first", about, svg, ramp=ramp, pointer=pointer)


def _layers(table: CountTable) -> DataTable:
    rows = []
    for layer, counts in zip(table.layers, table.counts, strict=True):
        hottest, never = int(counts.argmax()), int((counts == 0).sum())
        total = int(np.maximum(counts, 0).sum())
        share = int(counts[hottest]) / total if total else None
        rows.append(
            (str(layer), f"{never:,}", str(hottest) if total else UNKNOWN, share_text(share))
        )
    names = ("layer", "never", "hottest expert", "its share")
    return DataTable("By layer", Table(tuple(map(Column, names)), rows))


_CURVES = {
    "learned on the earlier half": Key("held out: learned earlier, measured later", "c1"),
    "ranked and measured": Key("ranked on the same tokens (looks better)", "c1", "dotted"),
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
    headline, unknown = [], []
    if judged.halves is None:
        unknown.append("nothing could be held out: there are counts alone, or a single token")
    elif judged.verdict == "small":
        unknown.append("the sample is too small for a verdict")
    if top.share is not None and judged.verdict != "small":
        label = f"of later selections covered by the top {GATE_PERCENT} %"
        headline = [(share_text(top.share), f"{label}; uniform: {share_text(top.even_share)}")]
    return PageSection(
        name="coverage",
        sentence=judged.reason,
        figures=[_coverage_curves(curves, judged.reason)],
        blocks=trace_text.concentration(judged).blocks[:2],  # the table and its legend
        unknown=unknown,
        headline=headline,
    )


def _coverage_curves(named: Mapping[str, list[float]], reason: str) -> Picture:
    curves = {
        key: [None if math.isnan(share) else share for share in curve]
        for start, key in _CURVES.items()
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
        rows = (f"{key.label}: {share_text(curve[number])}" for key, curve in curves.items())
        texts.append("\n".join([f"top {share:.0%} of the experts", *rows]))
    return Picture(
        "coverage",
        "Selections covered, by the share of experts kept",
        f"Curves that rise from nothing to everything: {reason}.",
        picture(15, across, up, *reversed(lines)),
        keys=[*curves],
        pointer=points(shares, texts),
    )


_POLICIES = {
    "belady": Key("belady (knows the future)", "c3", "dashed"),
    "static": Key("static, held out", "c2"),
    "lrfu": Key("LRFU", "c4"),
}
"""The policies that are drawn beside LRU; the table has all."""


def cache_section(facts: ReportFacts) -> PageSection | str:
    """Draw the hit rates of caches by their budgets, with the requested budget marked."""
    simulation, budget = facts.simulation, facts.budget_length
    if simulation is None:
        problem = facts.problems.get("caches", "that takes the order of tokens, in a trace")
        return adding(problem, "MODEL --trace FILE")
    results = () if facts.at_budget is None else facts.at_budget.results
    sentence = f"all experts take {size_text(simulation.expert_length)}"
    tables, headline = [], []
    if results:
        rows = [
            (one.policy, share_text(one.decode_hit_rate), length_text(one.bytes_per_token))
            for one in sorted(results, key=lambda one: -(one.decode_hit_rate or 0))
        ]
        columns = (Column("policy", "l"), Column("hits"), Column("reads a token"))
        tables.append(DataTable(f"In {length_text(budget)}", Table(columns, rows)))
    lrfu = next((one for one in results if one.policy == "lrfu"), None)
    if lrfu is not None:
        rate, length = share_text(lrfu.decode_hit_rate), length_text(lrfu.budget_length)
        tokens = tokens_text(simulation.decode_token_count)
        headline.append((rate, f"hits of LRFU in {length}, over {tokens}"))
        read = length_text(lrfu.bytes_per_token)
        sentence += f"; in {length} LRFU hits {rate} of the lookups, and a token reads {read}"
    unknown = "no budget was named: `moepack report MODEL --budget 8GiB -o report.html` marks one"
    return PageSection(
        name="caches",
        sentence=sentence,
        figures=[_hit_rates(simulation, budget, sentence)],
        tables=tables,
        blocks=trace_text.simulation(simulation).blocks,
        unknown=[unknown] if budget is None else [],
        headline=headline,
    )


def _hit_rates(simulation: Simulation, budget: int | None, sentence: str) -> Picture:
    curves: dict[Key, list[tuple[float, float | None]]] = {
        Key("LRU", "c1"): [(one.budget_length, one.decode_hit_rate) for one in simulation.curve]
    }
    for policy, key in _POLICIES.items():
        rates = sorted(
            (one.budget_length, one.decode_hit_rate)
            for one in simulation.results
            if one.policy == policy and one.decode_hit_rate is not None
        )
        if rates:
            curves[key] = [*rates]
    even = [(one.budget_length, one.even_hit_rate) for one in simulation.curve]
    curves[Key("LRU, uniform router", "muted", "dashed")] = [*even]
    across = log_size_axis("memory for experts", (one.budget_length for one in simulation.curve))
    up = share_axis("lookups that hit")
    content = [line(across, up, key, pairs) for key, pairs in reversed(curves.items())]
    marks = {"one token": simulation.step_length, f"budget {length_text(budget)}": budget}
    content += [
        mark(across, length, text)
        for text, length in marks.items()
        if length is not None and across.least <= length <= across.most
    ]
    texts = [
        f"{size_text(one.budget_length)}, {one.budget_length / simulation.expert_length:.0%} of "
        f"all experts\nLRU: {share_text(one.decode_hit_rate)}\n"
        f"uniform router: {share_text(one.even_hit_rate)}"
        for one in simulation.curve
    ]
    places = [round(across.share(one.budget_length), 5) for one in simulation.curve]
    return Picture(
        "caches",
        "Hit rate in decoding, by memory for experts",
        f"Curves that rise with memory: {sentence}.",
        picture(15, across, up, *content),
        keys=[*curves],
        pointer=points(places, texts),
    )
