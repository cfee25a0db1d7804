"""Imports as text for people: the pack, and the comparison of an engine's files with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.report import pack_text, verification_text

if TYPE_CHECKING:  # it brings numpy
    from moepack.packing.importing import ImportSummary


def imported(summary: ImportSummary, shown: int | None = verification_text.SHOWN_FINDINGS) -> str:
    """Write the outcome of packing and of the comparison; `shown` is as for `verify`."""
    lines = [pack_text.packed(summary.pack), verification_text.report(summary.report, shown)]
    if summary.report.findings:
        lines.append(f"  {summary.pack.path} has the bytes of the GGUF, and stays")
    return "\n".join(lines)
