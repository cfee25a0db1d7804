"""The mirror of a pack, made, shown and removed, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text, size_text
from moepack.report import digest_text

if TYPE_CHECKING:
    from moepack.inspection.facts import MirrorFacts, PackMirrorFacts
    from moepack.packing.copies.mirror import MirrorSummary, RemovedMirror


def mirror(facts: MirrorFacts) -> str:
    """Write the path and the length of a mirror, or the reason why it is not read."""
    path = shorten(str(facts.path))
    if facts.problem is not None:
        return f"{path}: not read: {shorten(facts.problem)}"
    assert facts.length is not None
    hottest = "" if facts.hottest is None else f", the hottest {size_text(facts.hottest)}"
    return f"{path}: {size_text(facts.length)} of {size_text(facts.data_length)}{hottest}"


def shown(facts: PackMirrorFacts) -> str:
    """Write the mirror that a pack has."""
    if facts.mirror is None:
        return f"{shorten(facts.path)}: has no mirror"
    return mirror(facts.mirror)


def made(summary: MirrorSummary) -> str:
    """Write the result of mirroring."""
    kept = f", {size_text(summary.kept_length)} of it kept" if summary.kept_length else ""
    experts = count_text(summary.expert_count, "expert")
    lines = [
        f"{shorten(summary.path)}: {experts}, {size_text(summary.length)} of"
        f" {size_text(summary.all_length)}{kept}; read back:"
        f" {digest_text.compared(summary.digests)}"
    ]
    if summary.is_same_drive:
        lines.append("  it is on the same drive as the pack: nothing is gained by it")
    return "\n".join(lines)


def removed(summary: RemovedMirror) -> str:
    """Write the result of a removal."""
    if summary.is_removed:
        return f"{shorten(summary.path)}: removed"
    left = f"whatever was in {shorten(summary.path)} is left there"
    return f"{shorten(summary.pack)}: no longer has a mirror; {left}"
