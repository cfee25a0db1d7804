"""Statistics of traces and hotness, written for people."""

from collections.abc import Mapping

from moepack.common.sizes import count_text
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, number_text, share_text, tokens_text
from moepack.running.programs.learned import LearnedFacts
from moepack.traces.analysis.concentration import Concentration
from moepack.traces.analysis.reuse import ReuseFacts
from moepack.traces.analysis.statistics import TraceStatistics
from moepack.traces.hotness.measure import HotnessFileFacts
from moepack.traces.summary import TraceSummary


def imported(summary: TraceSummary) -> str:
    """Write the size of a trace file after an import or a recording, and its new part."""
    lines = [f"{summary.path}: {_totals(summary.token_count, summary.request_count)}"]
    lines[0] += f", {count_text(summary.selection_count, 'selection')}"
    if summary.counted_selection_count:
        lines.append(f"  {summary.counted_selection_count:,} more are counts without tokens")
    added = summary.added
    if added.selection_count != summary.selection_count:
        totals = _totals(added.token_count, added.request_count)
        selections = count_text(added.selection_count, "selection")
        lines.append(f"  added just now: {totals}, {selections}")
    if summary.unknown:
        lines.append(f"  not known: {', '.join(summary.unknown)}")
    return "\n".join([*lines, *left_out(summary.warnings)])


def _totals(token_count: int, request_count: int) -> str:
    return f"{count_text(token_count, 'token')} in {count_text(request_count, 'request')}"


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
    return "\n".join([*lines, *left_out(facts.warnings)])


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
    pin = "pin some of them" if facts.is_pinning else "pin none"
    lines += [f"  runs       {begin}, and {pin}", f"  kept in    {facts.path}", facts.reason]
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
    return Page(*blocks, *_reuse(facts.reuse), *left_out(facts.warnings))


def _working_set(facts: TraceStatistics) -> Table:
    columns = [Column("share", "l"), Column("experts (U)"), Column("new (D)", rank=1)]
    if facts.has_lengths:
        columns += [Column("bytes", rank=2), Column("new bytes", rank=3)]
    rows = []
    for row in facts.working_set:
        cells = [share_text(row.share), _average(row.expert_count), _average(row.new_count)]
        if facts.has_lengths:
            cells += [length_text(row.length), length_text(row.new_length)]
        rows.append(cells)
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
        ("other requests", [top.interleaved_share for top in tops]),
        ("uniform router", [top.even_share for top in tops]),
        ("LRU cache", [top.latest_share for top in tops]),
    ):
        if name != "other requests" or any(share is not None for share in shares):
            rows.append([name, "", "", "", *map(share_text, shares)])
    columns = [Column(f"top {top.percent} %", rank=_TOP_RANKS.get(top.percent, 5)) for top in tops]
    return Page(
        Table((*_SKEW, *columns), rows),
        "top: ranked on the earlier half, measured on the later; other requests: ranked on every "
        "other one, measured on the rest; LRU cache: one of as many experts",
        "",
        facts.reason,
        *left_out(facts.warnings),
    )


_SKEW = (
    *(Column("layer", "l"), Column("entropy", rank=3), Column("Gini", rank=2)),
    Column("never", rank=6),
)
_TOP_RANKS = {25: 0, 50: 1, 10: 4}
"""The verdict is about the top quarter."""


def _average(average: float | None) -> str:
    return UNKNOWN if average is None else f"{average:.2f}"


def left_out(warnings: Mapping[str, int]) -> list[str]:
    """Write the number of entries left out of files, a line for each problem."""
    return [f"  left out: {count:,} × {problem}" for problem, count in sorted(warnings.items())]
