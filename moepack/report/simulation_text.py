"""What a simulation says, written for people."""

from moepack.report.table import aligned
from moepack.report.trace_text import left_out
from moepack.report.values import length_text, share_text
from moepack.simulation.facts import LEAST_SELECTIONS, CacheFacts, Simulation
from moepack.sizes import count_text, size_text

_NOTES = {
    "belady": "belady knows what comes: where experts have one length, nothing that reads them "
    "when they are chosen hits more",
    "layer": "layer and layer+lfu keep what each layer used last, even if that is over the budget",
    "static": "static holds from the start what was hottest in the first half of what is decoded, "
    "and is measured on the second",
    "static-prompt": "static-prompt holds what was hottest in each request's prompt",
}


def text(facts: Simulation) -> str:
    """Write what a trace is, a table of budgets and policies, and what it does not tell."""
    tokens, requests = (
        count_text(count, noun)
        for count, noun in ((facts.token_count, "token"), (facts.request_count, "request"))
    )
    turns = f"; {facts.session_count} requests run in turns" if facts.session_count > 1 else ""
    lines = [
        f"{tokens} in {requests}, {facts.decode_token_count:,} of them decoded{turns}",
        f"experts: {size_text(facts.expert_length)}; a decoded token uses "
        f"{length_text(facts.step_length)}: with less, LRU finds little",
    ]
    if facts.unknown:
        lines.append(f"not known: {', '.join(facts.unknown)}")
    if facts.enough_length is not None:
        lines.append(
            f"with {size_text(facts.enough_length)} LRU hits all but 1 % of what it does with "
            "everything in memory"
        )
    lines += ["", *_table(facts), "", *_notes(facts)]
    return "\n".join(lines)


def _table(facts: Simulation) -> list[str]:
    """Write the decode hit rates: a row for each budget, a column for each policy."""
    policies = list(dict.fromkeys(one.policy for one in facts.results if one.slots is None))
    even = {point.budget_length: point.even_hit_rate for point in facts.curve}
    by_budget: dict[int, dict[str, CacheFacts]] = {}
    for one in facts.results:
        if one.slots is None:
            by_budget.setdefault(one.budget_length, {})[one.policy] = one
    rows = [["budget", "of all", *policies, "even", "LRU reads a token"]]
    for budget, found in sorted(by_budget.items()):
        share = next(iter(found.values())).budget_share
        rates = [share_text(found[policy].decode_hit_rate) for policy in policies]
        lru = found.get("lru")
        read = None if lru is None else lru.bytes_per_token
        rows.append(
            [
                *(size_text(budget), f"{share:.0%}", *rates, share_text(even.get(budget))),
                length_text(read),
            ]
        )
    lines = aligned(rows) if by_budget else []
    slots = [one for one in facts.results if one.slots is not None]
    if slots:
        rows = [["slots a layer", "bytes", "of all", "hits", "read a token"]]
        for one in slots:
            read = one.bytes_per_token
            rows.append(
                [
                    *(str(one.slots), size_text(one.budget_length), f"{one.budget_share:.0%}"),
                    share_text(one.decode_hit_rate),
                    length_text(read),
                ]
            )
        lines += ["", *aligned(rows)] if lines else aligned(rows)
    if facts.prefetches:
        lines += ["", *_prefetches(facts)]
    return lines


def _prefetches(facts: Simulation) -> list[str]:
    rows = [["budget", "ahead", "of misses", "useful a token", "in vain a token"]]
    for one in facts.prefetches:
        rows.append(
            [
                *(size_text(one.budget_length), str(one.guessed_count)),
                share_text(one.useful_share),
                *(length_text(one.useful_bytes_per_token), length_text(one.wasted_bytes_per_token)),
            ]
        )
    return aligned(rows)


def _notes(facts: Simulation) -> list[str]:
    policies = {one.policy for one in facts.results}
    lines = ["hits are shares of what decoded tokens look up; even: LRU with an even router"]
    lines += [note for policy, note in _NOTES.items() if policy in policies]
    if facts.cold_share is not None:
        lines.append(
            f"{facts.cold_share:.1%} are the first use of an expert: what reads it then misses it"
        )
    if not facts.is_long_enough:
        lines.append(
            f"the trace is too short to tell experts apart: {facts.lookups_per_expert:.1f} lookups "
            f"an expert in half of it, at least {LEAST_SELECTIONS} are needed"
        )
    return lines + left_out(facts.warnings)
