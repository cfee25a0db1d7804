"""What verification found, and how it is written down."""

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from typing import Any, NamedTuple

_FORBIDDEN_IN_XML = {code: "�" for code in range(32) if code not in (9, 10, 13)}


class Finding(NamedTuple):
    """One thing that is wrong.

    `kind` is stable and machine-readable (README, "verify"); `offset` counts from the start of
    `file`. What does not apply is None.
    """

    kind: str
    message: str
    layer: int | None = None
    expert: int | None = None
    part: str | None = None
    file: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        fields = (
            ("layer", self.layer),
            ("expert", self.expert),
            ("", self.part),
            ("in", self.file),
            ("at byte", self.offset),
        )
        where = " ".join(f"{name} {value}".strip() for name, value in fields if value is not None)
        return f"{self.kind}: {where}: {self.message}" if where else f"{self.kind}: {self.message}"


class Report(NamedTuple):
    """The outcome of a verification: lengths in bytes, all findings in a stable order.

    `compared_length` is how much was compared with the source; None where no source was given.
    """

    path: str
    findings: tuple[Finding, ...]
    layers: tuple[int, ...]
    blob_count: int
    part_count: int
    read_length: int
    compared_length: int | None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Give the report as `moepack verify --json` prints it."""
        fields = self._asdict()
        fields["findings"] = [finding._asdict() for finding in self.findings]
        return {"passed": self.passed, **fields}


def to_junit(report: Report) -> bytes:
    """Write the report as JUnit XML: one test for the pack as such, and one for each layer."""
    by_layer: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        by_layer[finding.layer].append(finding)
    cases = [None, *sorted({*report.layers, *(layer for layer in by_layer if layer is not None)})]
    suite = ElementTree.Element(
        "testsuite",
        name="moepack verify",
        tests=str(len(cases)),
        failures=str(len(by_layer)),
        errors="0",
    )
    for layer in cases:
        name = "pack" if layer is None else f"layer {layer}"
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(report.path), name=name)
        if findings := by_layer[layer]:
            failure = ElementTree.SubElement(case, "failure", message=f"{len(findings)} findings")
            failure.text = _xml("\n".join(map(str, findings)))
    data: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return data


def _xml(text: str) -> str:
    return text.translate(_FORBIDDEN_IN_XML).encode("utf-8", "replace").decode()
