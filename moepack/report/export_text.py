"""Exports as text for people: what each format is, the plan of an export, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.common.sizes import count_text, size_text
from moepack.report import digest_text
from moepack.report.page import Block, Page, Verbatim

if TYPE_CHECKING:  # most commands write without them
    from moepack.pack.engines.contract import Engine
    from moepack.pack.engines.exporting import ExportSummary


def facts(engine: Engine) -> list[tuple[str, str]]:
    """Return the facts about a format, as rows of a term and a phrase."""
    return [
        ("reads", engine.reads),
        ("written", engine.writes),
        ("copied", engine.copies),
        ("proven", engine.proof),
    ]


def plan(summary: ExportSummary) -> Page:
    """Write what an export would write, and the space that it would take."""
    assert summary.needed_length is not None
    assert summary.free_space is not None
    lines = [
        f"{summary.path}: {_contents(summary)}",
        f"  takes     {size_text(summary.needed_length)}",
        f"  free      {size_text(summary.free_space)}",
        *(f"  note      {note}" for note in summary.notes),
    ]
    return Page(*lines, Verbatim(f"  then      {summary.command}"))


def exported(summary: ExportSummary) -> Page:
    """Write what an export has written, and how it is proven."""
    text = f"{summary.path}: {_contents(summary)}"
    if summary.cloned_length:
        text += f", {size_text(summary.cloned_length)} of it shared with the pack"
    if summary.kept_length:
        text += f", {size_text(summary.kept_length)} there already"
    digests = "no byte of an expert was copied"
    if summary.is_copied:
        digests = digest_text.compared(summary.digests)
    notes: list[Block] = [f"  note: {note}" for note in summary.notes]
    return Page(f"{text}; {digests}", *notes)


def _contents(summary: ExportSummary) -> str:
    files = "" if summary.file_count == 1 else f" in {count_text(summary.file_count, 'file')}"
    tensors = count_text(summary.tensor_count, "tensor")
    return f"{tensors}{files}, {size_text(summary.length)}"
