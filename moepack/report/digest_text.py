"""Statements about digests: the one place that says that parts had theirs."""

from moepack.common.digest_counts import DigestCounts
from moepack.common.sizes import size_text


def compared(counts: DigestCounts) -> str:
    """Write whether this run compared all parts with their digests; name the rest."""
    unread_length = counts.known_length - counts.compared_length
    if unread_length and not counts.compared_length:
        return "no part was read"
    words = [f"parts of {size_text(unread_length)} were not read"] if unread_length else []
    if counts.unknown_length:
        of_some = f" of {size_text(counts.unknown_length)}" if counts.known_length else ""
        words.append(f"digests{of_some} are not known")
    if not words and counts.compared_length:
        return "every part had its digest"
    if counts.compared_length:
        words.append("every other part had its digest")
    return ", ".join(words) or "no digest was computed"
