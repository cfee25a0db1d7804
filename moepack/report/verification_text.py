"""The outcome of a verification as text."""

from collections import defaultdict

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text, size_text
from moepack.pack.verifying.report import Finding, Report

SHOWN_FINDINGS = 3
"""The number of findings of each kind that are shown."""


def report(outcome: Report, shown: int | None = SHOWN_FINDINGS) -> str:
    """Write the outcome: a headline and its findings, then the extent of the verification.

    Of each kind, the first `shown` findings are written; None is all of them.
    """
    lines = [] if outcome.headline is None else [outcome.headline]
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for finding in outcome.findings:
        by_kind[finding.kind].append(finding)
    for kind, findings in by_kind.items():
        lines.append(f"  {kind}: {count_text(len(findings), 'finding')}")
        for finding in findings[:shown]:
            place = shorten(finding.place)
            lines.append(f"    {place}: {finding.message}" if place else f"    {finding.message}")
        if hidden := len(findings) - len(findings[:shown]):
            lines.append(f"    … and {hidden:,} more: -v lists all")
    lines.append(f"{shorten(outcome.path)}: {verdict(outcome)}. {extent(outcome)}")
    if outcome.not_looked_at:
        lines.append(f"  not looked at: {', '.join(outcome.not_looked_at)}")
    return "\n".join(lines)


def verdict(outcome: Report) -> str:
    """Write whether anything is wrong."""
    if outcome.findings:
        return count_text(len(outcome.findings), "finding")
    return "sound" if outcome.passed else "no fault in the checked parts"


def extent(outcome: Report) -> str:
    """Write how much was checked, and compared."""
    counts = [_share(outcome.checked_blob_count, outcome.blob_count, "blob")]
    if outcome.passed:
        counts.append(count_text(outcome.part_count, "part"))
    if outcome.tensor_count:
        counts.append(_share(outcome.checked_tensor_count, outcome.tensor_count, "dense tensor"))
    whole = "" if outcome.passed else f" of {size_text(outcome.data_length)}"
    counts.append(f"{size_text(outcome.read_length)}{whole} read")
    if outcome.compared_length is None:
        counts.append("digests only")
    for length, what in (
        (outcome.compared_length, f"compared with {outcome.compared_with}"),
        (outcome.gguf_py_length, "compared with gguf-py"),
        (outcome.mirror_length, "of its mirror read"),
    ):
        if length is not None:
            counts.append(f"{size_text(length)} {what}")
    if outcome.sha256_count:
        counts.append(f"SHA-256 of {count_text(outcome.sha256_count, 'shard')} right")
    return ", ".join(counts)


def _share(checked: int, count: int, noun: str) -> str:
    total = count_text(count, noun)
    return total if checked == count else f"{checked:,} of {total}"
