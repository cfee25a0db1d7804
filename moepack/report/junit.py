"""Reports of verification as JUnit XML, which systems for continuous integration show."""

import xml.etree.ElementTree as ElementTree
from collections import defaultdict

from moepack.common.escaping import one_line
from moepack.common.sizes import count_text
from moepack.pack.verifying.report import Finding, Report


def encode(report: Report) -> bytes:
    """Return a report as JUnit XML: one test for the pack as such, and one for each layer.

    A test for what was not looked at as a whole is skipped, unless there are findings.
    """
    by_layer: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        by_layer[finding.layer].append(finding)
    cases = [None, *sorted({*report.layers, *(layer for layer in by_layer if layer is not None)})]
    left_out = {*cases} - {*report.checked_layers, *by_layer}
    if not report.not_looked_at:
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
        case = ElementTree.SubElement(suite, "testcase", classname=one_line(report.path), name=name)
        if findings := by_layer.get(layer):
            message = count_text(len(findings), "finding")
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = "\n".join(one_line(str(finding)) for finding in findings)
        elif layer in left_out:
            message = f"not looked at: {', '.join(report.not_looked_at)}"
            ElementTree.SubElement(case, "skipped", message=one_line(message))
    data: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return data
