"""What was found in traces, written for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moepack.analysis.concentration import Concentration, TopCoverage
from moepack.analysis.reuse import ReuseFacts
from moepack.analysis.statistics import TraceStatistics
from moepack.hotness.measure import HotnessFacts
from moepack.programs.learned import LearnedFacts
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, share_text
from moepack.sizes import count_text
from moepack.trace.summary import TraceSummary


def imported(summary: TraceSummary) -> str:
    """Write what an import or a recording came to: the whole file, and what is new in it."""
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


def hotness(facts: HotnessFacts) -> str:
    """Write what measuring hotness came to."""
    over = "an unknown number of tokens"
    if facts.token_count is not None:
        over = count_text(facts.token_count, "token")
    lines = [
        f"{facts.path}: {count_text(facts.selection_count, 'selection')} of "
        f"{count_text(facts.expert_count, 'expert')} over {over}"
    ]
    if facts.held_out is None:
        lines.append("  nothing is held out to judge by: that takes tokens, and here are counts")
    else:
        lines.append("  the later half is held out to judge by")
    if len(facts.models) > 1:
        lines.append(f"  counted together, though of different models: {', '.join(facts.models)}")
    return "\n".join([*lines, *left_out(facts.warnings)])


def learned(facts: LearnedFacts) -> str:
    """Write what runs of a model have chosen lately, and what comes of it."""
    if facts.since is None:
        return (
            "nothing was learned of this model yet: run and serve do, with memory for a part of it"
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
    begin = "with the experts that were used most" if facts.is_warming else "as if nothing was"
    pin = "pin some of them" if facts.is_pinning else "pin none"
    lines.append(f"  runs       begin {begin}, and {pin}")
    return "\n".join([*lines, f"  kept in    {facts.path}", facts.reason])


def stats(facts: TraceStatistics) -> Page:
    """Write the working-set table and the reuse of traces."""
    windows = count_text(facts.window_count, "window")
    requests = count_text(facts.request_count, "request")
    tokens = count_text(facts.window, "token")
    blocks: list[Block] = [f"{windows} of {tokens} in {requests}", _working_set(facts)]
    if not facts.window_count:
        blocks.append("no request has a whole window of tokens that are known one by one")
    elif facts.working_set[-1].new_count is None:
        blocks.append("no request has two windows: what is new in the second is not known")
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
        (str(layer.layer), share_text(layer.repeat_share), _number(layer.median_distance))
        for layer in reuse.layers
    ]
    return [
        f"of {count_text(reuse.token_count, 'token')}:",
        f"  chosen by the token before too   {share_text(reuse.repeat_share)}",
        f"  half of all reuses within        {half}",
        Table((Column("layer"), Column("repeated"), Column("half within")), rows),
    ]


def concentration(facts: Concentration) -> Page:
    """Write the concentration gate."""
    tops: Sequence[TopCoverage] = facts.total.coverage
    rows = []
    for skew in [*facts.layers, facts.total]:
        name = "all" if skew.layer is None else str(skew.layer)
        numbers = (f"{skew.entropy:.3f}", f"{skew.gini:.3f}", _number(skew.never_count))
        rows.append([name, *numbers, *_shares(top.share for top in skew.coverage)])
    if any(top.interleaved_share is not None for top in tops):
        rows.append(_of_all("other requests", (top.interleaved_share for top in tops)))
    rows.append(_of_all("even router", (top.even_share for top in tops)))
    rows.append(_of_all("LRU cache", (top.latest_share for top in tops)))
    shares = [Column(f"top {top.percent} %", rank=_TOP_RANKS.get(top.percent, 5)) for top in tops]
    return Page(
        Table((*_SKEW, *shares), rows),
        "top: learned on the earlier half, measured on the later; other requests: learned on every "
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


def _of_all(name: str, shares: Iterable[float | None]) -> list[str]:
    return [name, "", "", "", *_shares(shares)]


def _shares(shares: Iterable[float | None]) -> Iterator[str]:
    return map(share_text, shares)


def _average(average: float | None) -> str:
    return UNKNOWN if average is None else f"{average:.2f}"


def _number(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)


def left_out(warnings: Mapping[str, int]) -> list[str]:
    """Write what was left out of files, a line for each problem."""
    return [f"  left out: {count:,} × {problem}" for problem, count in sorted(warnings.items())]
