"""Packs that are pulled, whole or in part, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text, named_text, size_text
from moepack.report import digest_text

if TYPE_CHECKING:
    from moepack.inspection.facts import PartialFacts
    from moepack.packing.copies.pull import PullSummary
    from moepack.packing.fetched import FetchPlan


def fetching(plan: FetchPlan) -> str:
    """Write the address, the length and the new path of a model that is fetched to run it.

    And the length of all that were fetched before.
    """
    path, address = shorten(plan.path), shorten(plan.address)
    line = f"{address}: {size_text(plan.length)} come to {path}, once"
    if not plan.cache_length:
        return line
    cache = f"{shorten(plan.cache)} has {size_text(plan.cache_length)} of fetched models already"
    return f"{line}\n{cache}: remove those that are not wanted any more"


def plan(summary: PullSummary) -> str:
    """Write the length of a pull, and where it comes from."""
    length = size_text(summary.length)
    if not summary.is_whole:
        length += f" of {size_text(summary.all_length)}"
    return f"{shorten(summary.path)}: {length} from {shorten(summary.origin)}"


def pulled(summary: PullSummary) -> str:
    """Write the result of a pull, and the experts that are missing."""
    fetched = size_text(summary.fetched_length or 0)
    kept = f", {size_text(summary.kept_length)} there already" if summary.kept_length else ""
    if summary.mended_length:
        kept += f", {size_text(summary.mended_length)} mended"
    path, digests = shorten(summary.path), digest_text.compared(summary.digests)
    if summary.is_whole:
        return f"{path}: the whole pack, {fetched} pulled{kept}; {digests}"
    return (
        f"{path}: {_share(summary.expert_count, summary.all_expert_count)} and the dense part,"
        f" {fetched} pulled{kept}; {digests}\n"
        f"  {_missing(summary.expert_count, summary.all_expert_count, summary.missing_layers)},"
        f" and read from {shorten(summary.origin)}"
    )


def partial(facts: PartialFacts) -> str:
    """Write the share of a partial pack that is there."""
    return (
        f"{_share(facts.expert_count, facts.all_expert_count)}, {size_text(facts.length)};"
        f" {_missing(facts.expert_count, facts.all_expert_count, facts.missing_layers)},"
        f" and read from {shorten(facts.origin)}"
    )


def _share(count: int, all_count: int) -> str:
    return f"{count:,} of {count_text(all_count, 'expert')}"


def _missing(count: int, all_count: int, layers: tuple[int, ...]) -> str:
    """Write the count of missing experts, and the `layers` that have none."""
    of_layers = f", all of {named_text('layer', layers)} among them" if layers else ""
    missing = all_count - count
    verb = "is" if missing == 1 else "are"
    return f"{count_text(missing, 'expert')} {verb} missing{of_layers}"
