"""The command `report`: a model as one page for a browser."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.escaping import shorten
from moepack.common.extras import require
from moepack.common.paths import AnyPath, PathOrPaths, path_texts
from moepack.common.phases import Progress
from moepack.common.sizes import Size, count_text, size_text
from moepack.pack.reading.directory import named_pack
from moepack.pack.verifying.report import Report
from moepack.planning.machine.model import Machine
from moepack.report.html.gather import STAGE_COUNT, gather
from moepack.report.html.page import render
from moepack.report.html.section import MissingSection
from moepack.storage.atomic import write_whole
from moepack.traces.formats.registry import AnyTrace, ReadOptions


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
    machine: Machine | AnyPath | None = None,
    runs: PathOrPaths = (),
    budget: Size | None = None,
    verification: Report | None = None,
    options: ReadOptions = ReadOptions(),
    progress: Progress | None = None,
) -> ReportPage:
    """Make a page about a model: one file of HTML, which needs no network.

    `paths` is a source or a pack. `traces` (files, or what `read_trace` returned) add routing,
    coverage and caches, a `machine`, or the path of its file, the placement and the forecast,
    `runs` (JSON of `bench` and `run`, and of llama-bench) the measurements; runs also calibrate the
    forecast. `budget` is the memory for experts to mark (bytes, `8GiB`, or `25%` of the experts),
    by default that of a placement. A `verification` is what `verify` returned for the pack. The
    page is written to the file `output`, if there is one, and returned. The same inputs give the
    same page, whatever their folders.

    Raises MachineError without the extra `report`, and if the file cannot be written; RequestError
    for invalid options, and for files without measurements; and what `inspect`, `concentration` and
    `simulate` raise for models and traces. A placement or a forecast that is refused becomes a gap.
    """
    require("report")
    if verification is not None and named_pack(paths) is None:
        problem = "the verification of a pack, but not its page"
        raise RequestError(problem, path=path_texts(paths)[0])
    if budget is not None and not traces:
        raise RequestError("a budget to mark, but no trace", hint="`traces` give the hit rates")
    advance = partial(progress or (lambda done, total: None), 1, STAGE_COUNT)
    facts = gather(paths, traces, machine, path_texts(runs), budget, verification, options, advance)
    html, sections, missing = render(facts)
    data = html.encode()
    path = None if output is None else os.fspath(output)
    if path is not None:
        write_whole(path, data)
    advance()
    return ReportPage(html, ReportSummary(path, len(data), facts.name, sections, missing))


def summary_text(summary: ReportSummary) -> str:
    """Write the file of a page, its sections, and those that lack an input."""
    sections = count_text(len(summary.sections), "section")
    lines = [f"{summary.path}: {shorten(summary.title)}, {sections}, {size_text(summary.length)}"]
    if summary.missing:
        titles = ", ".join(one.title.lower() for one in summary.missing)
        lines.append(f"  not in it: {titles}; the page says what would add them")
    return "\n".join(lines)
