"""Traces as text for people: their statistics, hotness, and simulated caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moepack.common.sizes import count_text, size_text
from moepack.report.page import Block, Column, Page, Table
from moepack.report.values import UNKNOWN, length_text, number_text, share_text, tokens_text

if TYPE_CHECKING:
    from moepack.running.programs.learned import LearnedFacts
    from moepack.traces.analysis.concentration import Concentration
    from moepack.traces.analysis.statistics import ReuseFacts, TraceStatistics
    from moepack.traces.hotness.measure import HotnessFileFacts
    from moepack.traces.simulation.facts import CacheFacts, Simulation
    from moepack.traces.steps import TraceSummary


def imported(summary: TraceSummary) -> str:
    """Write the size of a trace file after an import or a recording, and its new part."""
    totals, added = _totals(summary.token_count, summary.request_count), summary.added
    lines = [f"{summary.path}: {totals}, {count_text(summary.selection_count, 'selection')}"]
    if summary.counted_selection_count:
        lines.append(f"  {summary.counted_selection_count:,} more are counts without tokens")
    if added.selection_count != summary.selection_count:
        totals = _totals(added.token_count, added.request_count)
        selections = count_text(added.selection_count, "selection")
        lines.append(f"  added just now: {totals}, {selections}")
    if summary.unknown:
        lines.append(f"  not known: {', '.join(summary.unknown)}")
    return "\n".join([*lines, *_left_out(summary.warnings)])


def _totals(token_count: int, request_count: int) -> str:
    return f"{count_text(token_count, 'token')} in {count_text(request_count, 'request')}"


def _left_out(warnings: Mapping[str, int]) -> list[str]:
    """Write the number of entries left out of files, a line for each problem."""
    return [f"  left out: {count:,} × {problem}" for problem, count in sorted(warnings.items())]


def hotness(facts: HotnessFileFacts) -> str:
    """Write the extent of measured hotness."""
    lines = [
        f"{facts.path}: {count_text(facts.selection_count, 'selection')} of "
        f"{count_text(facts.expert_count, 'expert')} over {tokens_text(facts.token_count)}",
        "  the later half is held out for evaluation",
    ]
    if facts.held_out is None:
        lines[1] = "  nothing is held out for evaluation: that takes tokens, and these are counts"
    if len(facts.models) > 1:
        lines.append(f"  counted together, though of different models: {', '.join(facts.models)}")
    return "\n".join([*lines, *_left_out(facts.warnings)])


def learned(facts: LearnedFacts) -> str:
    """Write the counts of a model's recent runs, and their effect on the next one."""
    if facts.since is None:
        return (
            "nothing was learned about this model yet: run and serve learn while only part of it is"
            " in memory"
        )
    lines = [
        f"{count_text(facts.selection_count, 'selection')} of {facts.chosen_count:,} of "
        f"{count_text(facts.expert_count, 'expert')} over {count_text(facts.token_count, 'token')} "
        f"since {facts.since}"
    ]
    if facts.coverage is not None:
        covered = ", ".join(
            f"{one.percent} % in {length_text(one.length)}" for one in facts.coverage.lengths
        )
        lines.append(f"  covered    {covered}, of {length_text(facts.coverage.total_length)}")
    begin = "begin with the most used experts" if facts.is_warming else "begin as if without counts"
    lines += [f"  runs       {begin}", f"  kept in    {facts.path}", facts.reason]
    return "\n".join(lines)


def stats(facts: TraceStatistics) -> Page:
    """Write the working-set table and the reuse of traces."""
    windows = count_text(facts.window_count, "window")
    requests = count_text(facts.request_count, "request")
    tokens = count_text(facts.window, "token")
    blocks: list[Block] = [f"{windows} of {tokens} in {requests}", _working_set(facts)]
    if not facts.window_count:
        blocks.append("no request has a whole window of single tokens")
    elif facts.working_set[-1].new_count is None:
        blocks.append("no request has two windows: the number of new experts is unknown")
    return Page(*blocks, *_reuse(facts.reuse), *_left_out(facts.warnings))


def _working_set(facts: TraceStatistics) -> Table:
    columns = [Column("share", "l"), Column("experts (U)"), Column("new (D)", rank=1)]
    if facts.has_lengths:
        columns += [Column("bytes", rank=2), Column("new bytes", rank=3)]
    rows = []
    for row in facts.working_set:
        averages = (row.expert_count, row.new_count)
        cells = [UNKNOWN if average is None else f"{average:.2f}" for average in averages]
        if facts.has_lengths:
            cells += [length_text(row.length), length_text(row.new_length)]
        rows.append([share_text(row.share), *cells])
    return Table(columns, rows)


def _reuse(reuse: ReuseFacts) -> list[Block]:
    if not reuse.token_count:
        return []
    half = UNKNOWN if reuse.median_distance is None else count_text(reuse.median_distance, "token")
    rows = [
        (str(layer.layer), share_text(layer.repeat_share), number_text(layer.median_distance))
        for layer in reuse.layers
    ]
    return [
        f"of {count_text(reuse.token_count, 'token')}:",
        f"  used by the token before too     {share_text(reuse.repeat_share)}",
        f"  half of all reuses within        {half}",
        Table((Column("layer"), Column("repeated"), Column("half within")), rows),
    ]


def concentration(facts: Concentration) -> Page:
    """Write the concentration gate."""
    tops = facts.total.coverage
    rows = []
    for skew in [*facts.layers, facts.total]:
        name = "all" if skew.layer is None else str(skew.layer)
        numbers = (f"{skew.entropy:.3f}", f"{skew.gini:.3f}", number_text(skew.never_count))
        rows.append([name, *numbers, *(share_text(top.share) for top in skew.coverage)])
    for name, shares in (
        ("uniform router", [top.even_share for top in tops]),
        ("LRU cache", [top.latest_share for top in tops]),
    ):
        rows.append([name, "", "", "", *map(share_text, shares)])
    columns = [Column(f"top {top.percent} %", rank=_TOP_RANKS.get(top.percent, 5)) for top in tops]
    return Page(
        Table((*_SKEW, *columns), rows),
        "top: ranked on the earlier half, measured on the later; LRU cache: one of as many experts",
        "",
        facts.reason,
        *_left_out(facts.warnings),
    )


_SKEW = (
    *(Column("layer", "l"), Column("entropy", rank=3), Column("Gini", rank=2)),
    Column("never", rank=6),
)
_TOP_RANKS = {25: 0, 50: 1, 10: 4}
"""The verdict is about the top quarter."""


def simulation(facts: Simulation) -> Page:
    """Write the size of a trace, tables of budgets and policies, and notes."""
    totals = _totals(facts.token_count, facts.request_count)
    lines = [
        f"{totals}, {facts.decode_token_count:,} of them decoded",
        f"experts: {size_text(facts.expert_length)}; a decoded token uses "
        f"{length_text(facts.step_length)}: with less, LRU seldom hits",
    ]
    if facts.unknown:
        lines.append(f"not known: {', '.join(facts.unknown)}")
    if facts.enough_length is not None:
        lines.append(
            f"with {size_text(facts.enough_length)} LRU has all but 1 % of the hits that it has "
            "with everything in memory"
        )
    return Page(*lines, "", _hit_rates(facts), "", *_notes(facts))


_NOTES = {
    "belady": "belady knows the future: with experts of one length, no cache that reads on demand "
    "hits more",
    "static": "static pins the hottest experts of the first half of decoding, and is measured on "
    "the second",
}
_RANKS: Sequence[str] = (
    *("lrfu", "lrfu reads a token", "lru", "belady", "uniform", "static", "of all"),
)
"""The ranks of columns: the first ones stay longest on narrow terminals."""


def _hit_rates(facts: Simulation) -> Table:
    """Write the decode hit rates: a row for each budget, a column for each policy."""
    policies = list(dict.fromkeys(one.policy for one in facts.results))
    even = {point.budget_length: point.even_hit_rate for point in facts.curve}
    by_budget: dict[int, dict[str, CacheFacts]] = {}
    for one in facts.results:
        by_budget.setdefault(one.budget_length, {})[one.policy] = one
    rows = []
    for budget, caches in sorted(by_budget.items()):
        share = next(iter(caches.values())).budget_share
        rates = [share_text(caches[policy].decode_hit_rate) for policy in policies]
        read = caches["lrfu"].bytes_per_token if "lrfu" in caches else None
        uniform = share_text(even.get(budget))
        rows.append([size_text(budget), f"{share:.0%}", *rates, uniform, length_text(read)])
    names = ("of all", *policies, "uniform", "lrfu reads a token")
    ranks = (_RANKS.index(name) if name in _RANKS else len(_RANKS) for name in names)
    ranked = (Column(name, rank=rank) for name, rank in zip(names, ranks, strict=True))
    return Table([Column("budget"), *ranked], rows)


def _notes(facts: Simulation) -> list[str]:
    """Write the meaning of the columns and of policies, and the limits of the trace."""
    from moepack.traces.simulation.facts import LEAST_SELECTIONS

    policies = {one.policy for one in facts.results}
    lines = ["hits are shares of the lookups of decoded tokens; uniform: LRU with a uniform router"]
    lines += [note for policy, note in _NOTES.items() if policy in policies]
    if facts.cold_share is not None:
        lines.append(
            f"{facts.cold_share:.1%} are the first use of an expert, which misses without prefetch"
        )
    if not facts.is_long_enough:
        lines.append(
            f"the trace is too short to tell experts apart: {facts.lookups_per_expert:.1f} lookups "
            f"an expert in half of it, at least {LEAST_SELECTIONS} are needed, as "
            f"{tokens_text(facts.needed_token_count)} have"
        )
    return lines + _left_out(facts.warnings)
