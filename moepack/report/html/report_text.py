"""The result of `report`, as text for people."""

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text, size_text
from moepack.report.html.report import ReportSummary


def text(summary: ReportSummary) -> str:
    """Write the file of a page, its sections, and those that lack an input."""
    sections = count_text(len(summary.sections), "section")
    lines = [f"{summary.path}: {shorten(summary.title)}, {sections}, {size_text(summary.length)}"]
    if summary.missing:
        titles = ", ".join(one.title.lower() for one in summary.missing)
        lines.append(f"  not in it: {titles}; the page says what would add them")
    return "\n".join(lines)
