"""What a program needed of its experts, for people."""

from moepack.pager.pager import Pager, PagerUsage
from moepack.report.values import length_text, share_text
from moepack.sizes import count_text, size_text


def beginning_of(pager: Pager) -> str:
    """Return in one line how much memory experts have, how much they need, and what comes first."""
    whole = pager.whole_length
    memory = f"memory for experts: {size_text(min(pager.budget, whole))}"
    first = "; those that earlier runs used most are read first" if pager.is_warming else ""
    if pager.budget >= whole:
        return f"{memory}, room for all of them{first}"
    return f"{memory} of {size_text(whole)}; a step needs {size_text(pager.floor)}{first}"


def usage(usage: PagerUsage) -> str:
    """Return in one line what a program looked up, what was read for it, and what is in memory."""
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
