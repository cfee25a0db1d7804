"""A page from its sections: one file of HTML, with its style, its script and its numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import resources
from typing import Any

from moepack.report.facts import escape_delete, to_json
from moepack.report.html.cache_section import cache_section
from moepack.report.html.coverage_section import coverage_section
from moepack.report.html.facts import ReportFacts
from moepack.report.html.forecast_section import forecast_section
from moepack.report.html.heat_section import heat_section
from moepack.report.html.measured_section import measured_section
from moepack.report.html.model_section import model_section
from moepack.report.html.pack_section import pack_section
from moepack.report.html.placement_section import placement_section
from moepack.report.html.section import DataTable, MissingSection, PageSection
from moepack.report.html.verification_section import verification_section
from moepack.report.page import FittedTable, Table, Verbatim
from moepack.version import __version__

SECTIONS: Mapping[str, Callable[[ReportFacts], PageSection | str]] = {
    "The model": model_section,
    "The map of the pack": pack_section,
    "Which experts are used": heat_section,
    "What the hottest experts cover": coverage_section,
    "Hit rates of caches": cache_section,
    "Where everything goes": placement_section,
    "How fast it will be": forecast_section,
    "What was measured": measured_section,
    "What verification found": verification_section,
}
"""The sections by their titles, in their order; without its facts each is the reason for that."""

_LEFT_OUT = ("blobs", "tensors", "counts", "inputs")
"""Facts that are in the page as data of its pictures, or as text."""


def render(facts: ReportFacts) -> tuple[str, tuple[str, ...], tuple[MissingSection, ...]]:
    """Return the page of facts, the titles of its sections, and the sections that are missing."""
    made = {title: make(facts) for title, make in SECTIONS.items()}
    sections = {title: one for title, one in made.items() if isinstance(one, PageSection)}
    missing = tuple(
        MissingSection(title, one) for title, one in made.items() if isinstance(one, str)
    )
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = _template().render(
        title=facts.name,
        version=__version__,
        inputs=facts.inputs,
        sections=sections,
        missing=missing,
        style=style,
        script=script,
        script_digest=digest,
        facts=_packed(_numbers(facts)),
    )
    return html, tuple(sections), missing


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=jinja2.FunctionLoader(_resource),
    )
    environment.filters.update(
        pairs=_pairs,
        shown=lambda table: list(FittedTable(table).widths),  # columns with any text
        blocks=_blocks,
        packed=_packed,
        spans=_spans,
        sentence=lambda text: f"{text[:1].upper()}{text[1:].removesuffix('.')}.",
    )
    return environment.get_template("page.html")


def _resource(name: str) -> str:
    return resources.files("moepack.report.html").joinpath(name).read_text("utf-8")


def _pairs(section: PageSection) -> tuple[list[Any], list[DataTable]]:
    """Return pictures, each with the table that fits beside it or None, and all other tables."""
    tables = [table for table in section.tables if table.place == "beside"]
    below = [table for table in section.tables if table.place == "below"]
    groups = [section.figures] if section.is_choice else [(one,) for one in section.figures]
    pairs = [(group, tables.pop(0) if tables else None) for group in groups]
    return pairs, [*tables, *below]


def _blocks(section: PageSection) -> list[tuple[str, Any]]:
    """Return the further lines of a section, each with its kind: text, command or table."""
    blocks: list[tuple[str, Any]] = []
    for block in section.blocks:
        if isinstance(block, Table):
            blocks.append(("table", DataTable("", block)))
        elif block.strip():
            kind = "command" if isinstance(block, Verbatim) else "text"
            blocks.append((kind, block.strip()))
    return blocks


def _spans(text: str) -> list[tuple[bool, str]]:
    """Return the pieces of a text, and whether each is in backquotes."""
    return [(number % 2 == 1, piece) for number, piece in enumerate(text.split("`")) if piece]


def _numbers(facts: ReportFacts) -> Any:
    names = (field.name for field in fields(facts) if field.name not in _LEFT_OUT)
    return {name: to_json(getattr(facts, name)) for name in names}


def _packed(value: Any) -> str:
    """Return JSON, deflated, as base64: letters that end no element of a page."""
    text = escape_delete(json.dumps(value, separators=(",", ":"), allow_nan=False))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
