"""A model as one file of HTML: its facts are gathered, and drawn with style, script and numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from moepack.common.errors import RequestError
from moepack.common.escaping import shorten
from moepack.common.extras import require
from moepack.common.paths import AnyPath, PathOrPaths, path_texts
from moepack.common.phases import Progress
from moepack.common.sizes import Size, count_text, size_text
from moepack.planning.machine.described import AnyMachine
from moepack.report.facts import escape_delete, to_json
from moepack.report.html.gather import STAGE_COUNT, gather
from moepack.report.html.model_section import model_section, pack_section
from moepack.report.html.plan_section import (
    forecast_section,
    measured_section,
    placement_section,
)
from moepack.report.html.routing_section import cache_section, coverage_section, heat_section
from moepack.report.html.section import DataTable, PageSection, ReportFacts
from moepack.report.page import Table, Verbatim
from moepack.storage.atomic import write_whole
from moepack.traces.formats.reading import AnyTrace
from moepack.traces.formats.registry import ReadOptions
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
}
"""The sections by their titles, in their order; without its facts each is the reason for that."""

_LEFT_OUT = ("blobs", "tensors", "counts", "inputs")
"""Facts that are in the page as data of its pictures, or as text."""


class MissingSection(NamedTuple):
    """A section that is not there: the reason, and the option that would add it."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """A page: the titles of its `sections`, and the `missing` ones with the options for them.

    `path` is its file, None if it was not written; `length` is its bytes.
    """

    path: str | None
    length: int
    title: str
    sections: tuple[str, ...]
    missing: tuple[MissingSection, ...]


class ReportPage(NamedTuple):
    """The text of a page, and its summary."""

    html: str
    summary: ReportSummary


def make_report(
    paths: PathOrPaths,
    output: AnyPath | None = None,
    *,
    traces: AnyTrace = (),
    machine: AnyMachine | None = None,
    runs: PathOrPaths = (),
    budget: Size | None = None,
    options: ReadOptions = ReadOptions(),
    progress: Progress | None = None,
) -> ReportPage:
    """Make a page about a model: one file of HTML, which needs no network.

    `paths` is a source or a pack. `traces` (files, or what `read_trace` returned) add routing,
    coverage and caches, a `machine`, or the path of its file, the placement and the forecast,
    `runs` (JSON of `bench` and `run`, and of llama-bench) the measurements; runs also calibrate the
    forecast. `budget` is the memory for experts to mark (bytes, `8GiB`, or `25%` of the experts),
    by default that of a placement. The page is written to the file `output`, if there is one, and
    returned. The same inputs give the same page, whatever their folders.

    Raises MachineError without the extra `report`, and if the file cannot be written; RequestError
    for invalid options, and for files without measurements; and what `inspect`, `concentration` and
    `simulate` raise for models and traces. A placement or a forecast that is refused becomes a gap.
    """
    require("report")
    if budget is not None and not traces:
        raise RequestError("a budget to mark, but no trace", hint="`traces` give the hit rates")
    advance = partial(progress or (lambda done, total: None), 1, STAGE_COUNT)
    facts = gather(paths, traces, machine, path_texts(runs), budget, options, advance)
    made = {title: make(facts) for title, make in SECTIONS.items()}
    sections = {title: one for title, one in made.items() if isinstance(one, PageSection)}
    missing = tuple(
        MissingSection(title, one) for title, one in made.items() if isinstance(one, str)
    )
    html = _render(facts, sections, missing)
    data = html.encode()
    path = None if output is None else os.fspath(output)
    if path is not None:
        write_whole(path, data)
    advance()
    summary = ReportSummary(path, len(data), facts.name, tuple(sections), missing)
    return ReportPage(html, summary)


def summary_text(summary: ReportSummary) -> str:
    """Write the file of a page, its sections, and those that lack an input."""
    sections = count_text(len(summary.sections), "section")
    lines = [f"{summary.path}: {shorten(summary.title)}, {sections}, {size_text(summary.length)}"]
    if summary.missing:
        titles = ", ".join(one.title.lower() for one in summary.missing)
        lines.append(f"  not in it: {titles}; the page says what would add them")
    return "\n".join(lines)


def _render(
    facts: ReportFacts, sections: Mapping[str, PageSection], missing: tuple[MissingSection, ...]
) -> str:
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
        shown=lambda table: list(table.widths()),  # columns with any text
        blocks=_blocks,
        packed=_packed,
        spans=_spans,
        sentence=lambda text: f"{text[:1].upper()}{text[1:].removesuffix('.')}.",
    )
    script = _resource("page.js")
    names = (field.name for field in fields(facts) if field.name not in _LEFT_OUT)
    html: str = environment.get_template("page.html").render(
        title=facts.name,
        version=__version__,
        inputs=facts.inputs,
        sections=sections,
        missing=missing,
        style=_resource("page.css"),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        facts=_packed({name: getattr(facts, name) for name in names}),
    )
    return html


def _resource(name: str) -> str:
    return resources.files("moepack.report.html").joinpath(name).read_text("utf-8")


def _pairs(section: PageSection) -> tuple[list[Any], list[DataTable]]:
    """Return pictures, each with the table beside it or None, and all other tables."""
    tables = list(section.tables)
    pairs = [(figure, tables.pop(0) if tables else None) for figure in section.figures]
    return pairs, tables


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


def _packed(value: Any) -> str:
    """Return facts as JSON, deflated, as base64: letters that end no element of a page."""
    text = escape_delete(json.dumps(to_json(value), separators=(",", ":"), allow_nan=False))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
