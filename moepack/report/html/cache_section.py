"""The section about caches: hit rates of policies by memory, the miss-ratio curves turned over."""

from __future__ import annotations

from moepack.common.sizes import size_text
from moepack.report import trace_text
from moepack.report.html.drawing import line, log_size_axis, mark, picture, share_axis
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, PageSection, Picture, adding
from moepack.report.page import Column, Table
from moepack.report.values import length_text, share_text, tokens_text
from moepack.traces.simulation.facts import Simulation

_POLICIES = {
    "belady": Key("belady (knows the future)", "c3", "dashed"),
    "static": Key("static, held out", "c2"),
    "lfu": Key("LFU", "c4"),
    "s3fifo": Key("S3-FIFO", "c5", "dotted"),
}
"""The policies that are drawn beside LRU; the table has all."""


def cache_section(facts: ReportFacts) -> PageSection | str:
    """Draw the hit rates of caches by their budgets, with the requested budget marked."""
    simulation, at_budget, budget = facts.simulation, facts.at_budget, facts.budget_length
    if simulation is None:
        problem = facts.problems.get("caches", "that takes the order of tokens, in a trace")
        return adding(problem, "MODEL --trace FILE")
    results = () if at_budget is None else at_budget.results
    lru = next((one for one in results if one.policy == "lru"), None)
    sentence = f"all experts take {size_text(simulation.expert_length)}"
    tables: list[DataTable] = []
    headline: tuple[tuple[str, str], ...] = ()
    if results:
        best_first = sorted(results, key=lambda one: -(one.decode_hit_rate or 0))
        rows = [
            (one.policy, share_text(one.decode_hit_rate), length_text(one.bytes_per_token))
            for one in best_first
        ]
        columns = (Column("policy", "l"), Column("hits"), Column("reads a token"))
        tables.append(DataTable(f"In {length_text(budget)}", Table(columns, rows)))
    if lru is not None:
        rate, length = share_text(lru.decode_hit_rate), length_text(lru.budget_length)
        tokens = tokens_text(simulation.decode_token_count)
        headline = ((rate, f"hits of LRU in {length}, over {tokens}"),)
        read = length_text(lru.bytes_per_token)
        sentence += f"; in {length} LRU hits {rate} of the lookups, and a token reads {read}"
    unknown = "no budget was named: `moepack report MODEL --budget 8GiB -o report.html` marks one"
    return PageSection(
        name="caches",
        sentence=sentence,
        figures=(_picture(simulation, budget, sentence),),
        tables=tuple(tables),
        blocks=trace_text.simulation(simulation).blocks,
        unknown=(unknown,) if budget is None else (),
        headline=headline,
    )


def _picture(simulation: Simulation, budget: int | None, sentence: str) -> Picture:
    points: dict[Key, list[tuple[float, float | None]]] = {
        Key("LRU", "c1"): [(one.budget_length, one.decode_hit_rate) for one in simulation.curve]
    }
    for policy, key in _POLICIES.items():
        rates = sorted(
            (one.budget_length, one.decode_hit_rate)
            for one in simulation.results
            if one.policy == policy and one.slots is None and one.decode_hit_rate is not None
        )
        if rates:
            points[key] = [*rates]
    even = [(one.budget_length, one.even_hit_rate) for one in simulation.curve]
    points[Key("LRU, uniform router", "muted", "dashed")] = [*even]
    across = log_size_axis("memory for experts", (one.budget_length for one in simulation.curve))
    up = share_axis("lookups that hit")
    content = [line(across, up, key, pairs) for key, pairs in reversed(points.items())]
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
        keys=tuple(points),
        pointer={"kind": "points", "at": [*places], "lines": [*texts]},
    )
