"""The mirror of a pack, made, shown and removed, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.escaping import short
from moepack.sizes import count_text, size_text

if TYPE_CHECKING:
    from moepack.packing.mirror import MirrorSummary, RemovedMirror
    from moepack.report.facts import MirrorFacts, PackMirrorFacts


def mirror(facts: MirrorFacts) -> str:
    """Write where a mirror is, what it holds, and whether it is read."""
    path = short(str(facts.path))
    if facts.problem is not None:
        return f"{path}: not read: {short(facts.problem)}"
    assert facts.length is not None
    hottest = "" if facts.hottest is None else f", the hottest {size_text(facts.hottest)}"
    return f"{path}: {size_text(facts.length)} of {size_text(facts.data_length)}{hottest}"


def shown(facts: PackMirrorFacts) -> str:
    """Write the mirror that a pack has."""
    if facts.mirror is None:
        return f"{short(facts.path)}: has no mirror"
    return mirror(facts.mirror)


def made(summary: MirrorSummary) -> str:
    """Write what was mirrored."""
    kept = f", {size_text(summary.kept_length)} of it kept" if summary.kept_length else ""
    experts = count_text(summary.expert_count, "expert")
    lines = [
        f"{short(summary.path)}: {experts}, {size_text(summary.length)} of"
        f" {size_text(summary.all_length)}{kept}; each was read back and has its digests"
    ]
    if summary.is_same_drive:
        lines.append("  it is on the same drive as the pack: nothing is gained by it")
    return "\n".join(lines)


def removed(summary: RemovedMirror) -> str:
    """Write what was removed."""
    if summary.is_removed:
        return f"{short(summary.path)}: removed"
    path = short(summary.path)
    return (
        f"{short(summary.pack)}: has no mirror any more; what was in {path} is left there, if any"
    )
