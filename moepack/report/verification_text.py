"""The outcome of a verification as text: what it comes to, and the first findings of each kind."""

from collections import defaultdict

from moepack.escaping import short
from moepack.sizes import count_text, size_text
from moepack.verifying.report import Finding, Report

SHOWN_FINDINGS = 3
"""Of each kind."""


def report(outcome: Report, shown: int | None = SHOWN_FINDINGS) -> str:
    """Write the outcome: a headline and the findings behind it, then what was looked at.

    Of each kind, the first `shown` findings are written; None is all of them.
    """
    lines = [] if outcome.headline is None else [outcome.headline]
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for finding in outcome.findings:
        by_kind[finding.kind].append(finding)
    for kind, findings in by_kind.items():
        lines += _kind(kind, findings, shown)
    lines.append(f"{short(outcome.path)}: {_verdict(outcome)}. {_looked_at(outcome)}")
    if outcome.not_looked_at:
        lines.append(f"  not looked at: {', '.join(outcome.not_looked_at)}")
    return "\n".join(lines)


def _kind(kind: str, findings: list[Finding], shown: int | None) -> list[str]:
    lines = [f"  {kind}: {count_text(len(findings), 'finding')}"]
    for finding in findings[:shown]:
        place = short(finding.place)
        lines.append(f"    {place}: {finding.message}" if place else f"    {finding.message}")
    hidden = len(findings) - len(findings[:shown])
    return lines + ([f"    … and {hidden:,} more: -v lists all"] if hidden else [])


def _verdict(outcome: Report) -> str:
    if outcome.findings:
        return count_text(len(outcome.findings), "finding")
    return "sound" if outcome.passed else "nothing wrong in what was looked at"


def _looked_at(outcome: Report) -> str:
    counts = [
        _share(outcome.checked_blob_count, outcome.blob_count, "blob"),
        count_text(outcome.part_count, "part") if outcome.passed else "",
        _share(outcome.checked_tensor_count, outcome.tensor_count, "dense tensor")
        if outcome.tensor_count
        else "",
        f"{size_text(outcome.read_length)} read"
        if outcome.passed
        else f"{size_text(outcome.read_length)} of {size_text(outcome.data_length)} read",
        "digests only"
        if outcome.compared_length is None
        else f"{size_text(outcome.compared_length)} compared with the source",
        ""
        if outcome.gguf_py_length is None
        else f"{size_text(outcome.gguf_py_length)} compared with gguf-py",
        ""
        if outcome.mirror_length is None
        else f"{size_text(outcome.mirror_length)} of its mirror read",
        f"SHA-256 of {count_text(outcome.sha256_count, 'shard')} right"
        if outcome.sha256_count
        else "",
    ]
    return ", ".join(filter(None, counts))


def _share(checked: int, count: int, noun: str) -> str:
    in_all = count_text(count, noun)
    return in_all if checked == count else f"{checked:,} of {in_all}"
