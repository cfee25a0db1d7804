"""The section about a verification: its extent, its verdict, and the findings."""

from __future__ import annotations

from moepack.common.sizes import count_text
from moepack.pack.verifying.report import Report
from moepack.report import verification_text
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, MissingSection, PageSection
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, number_text

TITLE = "What verification found"
SHOWN_FINDINGS = 100


def verification_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Write the verdict, the extent of the verification, and the first findings."""
    outcome = facts.verification
    if outcome is None:
        hint = "`moepack report PACK --verify --source MODEL -o report.html` adds it"
        return MissingSection(TITLE, f"the whole pack is read only on request; {hint}")
    tables = [_extent(outcome)]
    hidden = len(outcome.findings) - SHOWN_FINDINGS
    if outcome.findings:
        rows = [
            (one.kind, one.place or UNKNOWN, one.message)
            for one in outcome.findings[:SHOWN_FINDINGS]
        ]
        columns = (Column("kind", "l"), Column("place", "l"), Column("finding", "l"))
        tables.append(DataTable("Findings", Table(columns, rows)))
    unknown = [f"Not looked at: {one}." for one in outcome.not_looked_at]
    if outcome.compared_length is None:
        unknown.append("It was not compared with its source: digests alone were checked.")
    if hidden > 0:
        unknown.append(f"{count_text(hidden, 'more finding')}: `moepack verify -v PACK` lists all.")
    verdict = verification_text.verdict(outcome)
    headline = f"{outcome.headline}. " if outcome.headline else ""
    extent = verification_text.extent(outcome)
    return PageSection(
        name="verification",
        title=TITLE,
        sentence=f"{headline}{verdict[0].upper()}{verdict[1:]}: {extent}.",
        tables=tuple(tables),
        unknown=tuple(unknown),
        headline=((verdict, "by verification"),),
    )


def _extent(outcome: Report) -> DataTable:
    rows = (
        ("blobs", number_text(outcome.checked_blob_count), number_text(outcome.blob_count)),
        ("dense tensors", f"{outcome.checked_tensor_count:,}", f"{outcome.tensor_count:,}"),
        ("bytes", length_text(outcome.read_length), length_text(outcome.data_length)),
        ("compared with the source", length_text(outcome.compared_length), ""),
        ("shards by SHA-256", number_text(outcome.sha256_count), ""),
    )
    columns = (Column("", "l"), Column("checked"), Column("of"))
    return DataTable("Extent", Table(columns, rows))
