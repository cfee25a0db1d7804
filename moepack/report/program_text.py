"""What a program needed of its experts, for people."""

from moepack.pager.pager import PagerUsage
from moepack.report.values import length_text, share_text
from moepack.sizes import count_text, size_text


def beginning(budget: int, floor: int, *, is_warming: bool) -> str:
    """Return in one line how much memory experts have, how much they need, and what comes first."""
    first = "; those that earlier runs used most are read first" if is_warming else ""
    return f"memory for experts: {size_text(budget)}, at least {size_text(floor)}{first}"


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
