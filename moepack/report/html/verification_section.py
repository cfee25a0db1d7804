"""The section about a verification: its extent, its verdict, and the findings."""

from __future__ import annotations

from moepack.common.sizes import count_text
from moepack.report import verification_text
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, PageSection, adding
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN

SHOWN_FINDINGS = 100


def verification_section(facts: ReportFacts) -> PageSection | str:
    """Write the verdict, the extent of the verification, and the first findings."""
    outcome = facts.verification
    if outcome is None:
        return adding("the whole pack is read only on request", "PACK --verify --source MODEL")
    shown, hidden = outcome.findings[:SHOWN_FINDINGS], outcome.findings[SHOWN_FINDINGS:]
    tables = []
    if shown:
        findings = [(one.kind, one.place or UNKNOWN, one.message) for one in shown]
        columns = (Column("kind", "l"), Column("place", "l"), Column("finding", "l"))
        tables.append(DataTable("Findings", Table(columns, findings)))
    unknown = [f"not looked at: {one}" for one in outcome.not_looked_at]
    if outcome.compared_length is None:
        unknown.append("it was not compared with its source: digests alone were checked")
    if hidden:
        more = count_text(len(hidden), "more finding")
        unknown.append(f"{more}: `moepack verify -v PACK` lists all")
    verdict = verification_text.verdict(outcome)
    extent = verification_text.extent(outcome)
    headline = f"{outcome.headline}. " if outcome.headline else ""
    return PageSection(
        name="verification",
        sentence=f"{headline}{verdict[0].upper()}{verdict[1:]}: {extent}",
        tables=tuple(tables),
        unknown=tuple(unknown),
        headline=((verdict, "by verification"),),
    )
