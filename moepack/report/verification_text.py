"""The outcome of a verification: as text for people, and as JUnit XML for other programs."""

from collections import defaultdict

from moepack.common.escaping import one_line, shorten
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


def junit(outcome: Report) -> bytes:
    """Return an outcome as JUnit XML: one test for the pack as such, and one for each layer.

    A test for what was not looked at as a whole is skipped, unless there are findings.
    """
    import xml.etree.ElementTree as ElementTree  # slow to load

    by_layer: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in outcome.findings:
        by_layer[finding.layer].append(finding)
    cases = [None, *sorted({*outcome.layers, *(layer for layer in by_layer if layer is not None)})]
    left_out = {*cases} - {*outcome.checked_layers, *by_layer}
    if not outcome.not_looked_at:
        left_out.discard(None)
    suite = ElementTree.Element(
        "testsuite",
        name="moepack verify",
        tests=str(len(cases)),
        failures=str(len(by_layer)),
        errors="0",
        skipped=str(len(left_out)),
    )
    for layer in cases:
        name = "pack" if layer is None else f"layer {layer}"
        path = one_line(outcome.path)
        case = ElementTree.SubElement(suite, "testcase", classname=path, name=name)
        if findings := by_layer.get(layer):
            message = count_text(len(findings), "finding")
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = "\n".join(one_line(str(finding)) for finding in findings)
        elif layer in left_out:
            message = f"not looked at: {', '.join(outcome.not_looked_at)}"
            ElementTree.SubElement(case, "skipped", message=one_line(message))
    data: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return data
