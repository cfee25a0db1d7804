"""Speed, reads and memory of running models, for people."""

from moepack.common.sizes import count_text, size_text
from moepack.report.values import UNKNOWN, length_text, rate_text, share_text, speed_text
from moepack.running.pager.pager import Pager
from moepack.running.pager.usage import PagerUsage
from moepack.running.programs.run_facts import RunFacts, RunPhase

_ENDS = {"context": "; the context is full", "left": "; interrupted"}


def generated(facts: RunFacts) -> str:
    """Return two lines of statistics: of a prompt, and of its answer."""
    kept = f", {facts.kept_count:,} of them kept" if facts.kept_count else ""
    first = facts.first_token_seconds
    after = UNKNOWN if first is None else f"{first:.2f} s" if first < 9.995 else f"{first:,.0f} s"
    end = _ENDS.get(facts.end, "")
    return (
        f"prompt: {count_text(facts.prompt_count, 'token')}{kept}, "
        f"{rate_text(facts.prompt.tokens_per_second)} tok/s, first token after {after}\n"
        f"answer: {count_text(facts.token_count, 'token')}, {so_far(facts)}, "
        f"{size_text(facts.held_length)} of experts in memory; seed {facts.seed}{end}"
    )


def so_far(facts: RunPhase) -> str:
    """Return the speed of decoding, and the reads for it."""
    speed = f"{rate_text(facts.tokens_per_second)} tok/s, {share_text(facts.hit_rate)} hits"
    if not facts.read_length:
        return f"{speed}, nothing read"
    return (
        f"{speed}, {length_text(facts.length_per_token)} read a token, "
        f"{share_text(facts.read_share)} of the time waiting for the drive "
        f"({speed_text(facts.length_per_second)})"
    )


def pager_memory(pager: Pager) -> str:
    """Return a line about the memory for experts: its limit, the need, and the first reads.

    And about what the program takes beside them, as far as that is known.
    """
    whole, budget = pager.whole_length, pager.budget
    clauses = [f"memory for experts: {size_text(min(budget, whole))}"]
    if budget >= whole:
        clauses[0] += ", room for all of them"
    else:
        clauses[0] += f" of {size_text(whole)}"
        clauses.append(f"a step needs {size_text(pager.floor)}")
    if pager.beside:
        length = size_text(pager.beside)
        clauses.append(f"beside them up to {length} of dense weights and earlier prompts")
    if pager.is_warming:
        clauses.append("those that earlier runs used most are read first")
    return "; ".join(clauses)


def pager_usage(usage: PagerUsage) -> str:
    """Return a line about a program's experts: lookups, reads and memory."""
    lookups = usage.hit_count + usage.miss_count
    share = usage.hit_count / lookups if lookups else None
    speed = usage.read_length / usage.read_seconds if usage.read_seconds else None
    faults = f", {count_text(usage.fault_count, 'page fault')}" if usage.fault_count else ""
    return (
        f"experts: {share_text(share)} of {count_text(lookups, 'lookup')} hit, "
        f"{size_text(usage.read_length)} read in {usage.read_seconds:.1f} s "
        f"({length_text(speed)}/s), {size_text(usage.resident_length)} of "
        f"{size_text(usage.budget)} in memory{faults}"
    )
