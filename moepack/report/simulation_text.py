"""Results of a simulation, written for people."""

from moepack.common.sizes import count_text, size_text
from moepack.report.page import Page
from moepack.report.table import Column, Table
from moepack.report.trace_text import left_out
from moepack.report.values import length_text, share_text
from moepack.traces.simulation.facts import LEAST_SELECTIONS, CacheFacts, Simulation

_NOTES = {
    "belady": "belady knows the future: with experts of one length, no cache that reads on demand "
    "hits more",
    "layer": "layer and layer+lfu keep the last experts of each layer, even beyond the budget",
    "static": "static pins the hottest experts of the first half of decoding, and is measured on "
    "the second",
}


def text(facts: Simulation) -> Page:
    """Write the size of a trace, tables of budgets and policies, and notes."""
    tokens = count_text(facts.token_count, "token")
    requests = count_text(facts.request_count, "request")
    turns = f"; {facts.session_count} requests run in turns" if facts.session_count > 1 else ""
    lines = [
        f"{tokens} in {requests}, {facts.decode_token_count:,} of them decoded{turns}",
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
    tables = (_hit_rates(facts), _slots(facts), _prefetches(facts))
    blocks = [block for table in tables if table.rows for block in ("", table)]
    return Page(*lines, *blocks, "", *_notes(facts), *_doubts(facts))


def _hit_rates(facts: Simulation) -> Table:
    """Write the decode hit rates: a row for each budget, a column for each policy."""
    policies = list(dict.fromkeys(one.policy for one in facts.results if one.slots is None))
    even = {point.budget_length: point.even_hit_rate for point in facts.curve}
    by_budget: dict[int, dict[str, CacheFacts]] = {}
    for one in facts.results:
        if one.slots is None:
            by_budget.setdefault(one.budget_length, {})[one.policy] = one
    rows = []
    for budget, caches in sorted(by_budget.items()):
        share = next(iter(caches.values())).budget_share
        rates = [share_text(caches[policy].decode_hit_rate) for policy in policies]
        lru = caches.get("lru")
        read = None if lru is None else lru.bytes_per_token
        uniform = share_text(even.get(budget))
        rows.append([size_text(budget), f"{share:.0%}", *rates, uniform, length_text(read)])
    by_policy = (Column(policy, rank=_RANKS.get(policy, len(_RANKS))) for policy in policies)
    columns = [Column("budget"), Column("of all", rank=_RANKS["of all"]), *by_policy]
    columns += [Column("uniform", rank=_RANKS["uniform"]), Column("LRU reads a token", rank=1)]
    return Table(columns, rows)


_RANKS = {
    name: rank
    for rank, name in enumerate(
        (
            *("lru", "LRU reads a token", "belady", "uniform", "static", "lfu", "of all", "layer"),
            *("least-stale", "layer+lfu", "s3fifo"),
        )
    )
}
"""The ranks of columns: the first ones stay longest on narrow terminals."""


def _slots(facts: Simulation) -> Table:
    """Write the hit rates of caches by the number of experts per layer."""
    rows = [
        [
            str(one.slots),
            size_text(one.budget_length),
            f"{one.budget_share:.0%}",
            share_text(one.decode_hit_rate),
            length_text(one.bytes_per_token),
        ]
        for one in facts.results
        if one.slots is not None
    ]
    columns = (Column("slots a layer"), Column("bytes", rank=2), Column("of all", rank=3))
    return Table((*columns, Column("hits"), Column("read a token", rank=1)), rows)


def _prefetches(facts: Simulation) -> Table:
    rows = [
        [
            size_text(one.budget_length),
            str(one.guessed_count),
            share_text(one.useful_share),
            length_text(one.useful_bytes_per_token),
            length_text(one.wasted_bytes_per_token),
        ]
        for one in facts.prefetches
    ]
    columns = (Column("budget"), Column("ahead", rank=1), Column("of misses"))
    return Table((*columns, Column("useful a token", rank=2), Column("in vain a token")), rows)


def _notes(facts: Simulation) -> list[str]:
    """Write the meaning of the columns and of policies."""
    policies = {one.policy for one in facts.results}
    lines = ["hits are shares of the lookups of decoded tokens; uniform: LRU with a uniform router"]
    lines += [note for policy, note in _NOTES.items() if policy in policies]
    if facts.cold_share is not None:
        lines.append(
            f"{facts.cold_share:.1%} are the first use of an expert, which misses without prefetch"
        )
    return lines


def _doubts(facts: Simulation) -> list[str]:
    """Write the limits of the trace: its length, and the faults in its files."""
    lines = []
    if not facts.is_long_enough:
        lines.append(
            f"the trace is too short to tell experts apart: {facts.lookups_per_expert:.1f} lookups "
            f"an expert in half of it, at least {LEAST_SELECTIONS} are needed"
        )
    return lines + left_out(facts.warnings)
