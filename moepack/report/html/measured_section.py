"""The section about measurements: a drive, the gain of a pack, runs of a model."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.common.sizes import size_text
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.rates import KIND_WORDS
from moepack.report import measure_text
from moepack.report.html.section import DataTable, PageSection, ReportFacts
from moepack.report.page import Block, Column, Table
from moepack.report.values import UNKNOWN, length_text, number_text, rate_text, share_text
from moepack.running.serving.run_facts import RunFacts

_RUNS = (
    *(Column("file", "l"), Column("mode", "l"), Column("memory for experts"), Column("tok/s")),
    *(Column("hits"), Column("read a token"), Column("waiting"), Column("tokens")),
)


def measured_section(facts: ReportFacts) -> PageSection | str:
    """Write the measured surfaces, the gains and the runs."""
    if not facts.runs:
        reason = "no file of a measurement was given"
        hint = "`moepack bench PACK --json > bench.json` makes one, and"
        return f"{reason}; {hint} `moepack report PACK --run bench.json -o report.html` adds it"
    tables: list[DataTable] = []
    blocks: list[Block] = []
    sentences, runs = [], []
    for file in facts.runs:
        content = file.facts
        if isinstance(content, BenchReport):
            sentences.append(content.verdict)
            for order in dict.fromkeys(point.order for point in content.surface):
                points = [point for point in content.surface if point.order == order]
                cells = ((p.length, p.depth, p.bytes_per_second) for p in points)
                caption = f"{file.name}: {order} reads, MiB/s by size and reads in flight"
                tables.append(DataTable(caption, measure_text.surface(cells, indent=0)))
            blocks += measure_text.comparison(content)
        elif isinstance(content, EngineSpeed):
            blocks += measure_text.speed(content).blocks
        else:
            runs += _runs(file.name, content)
    if runs:
        tables.append(DataTable("Runs of the model", Table(_RUNS, runs)))
        speeds = ", ".join(f"{row[3]} tok/s ({row[1]})" for row in runs)
        sentences.append(f"Measured: {speeds}")
    text = " ".join(one if one.endswith(".") else f"{one}." for one in sentences)
    return PageSection(
        name="measured",
        sentence=text or "whole programs ran the model in turns.",
        tables=tables,
        blocks=blocks,
    )


def _runs(name: str, content: RunFacts | Sequence[MeasuredRun]) -> list[tuple[str, ...]]:
    if isinstance(content, RunFacts):
        row = (
            name,
            f"moepack run, {content.policy}",
            size_text(content.memory.experts),
            rate_text(content.tokens_per_second),
            share_text(content.hit_rate),
            length_text(content.length_per_token),
            share_text(content.read_share),
            number_text(content.token_count),
        )
        return [row]
    return [
        (
            f"{name}, {run.place}",
            KIND_WORDS[run.kind],
            length_text(run.budget),
            rate_text(run.tokens_per_second),
            *(UNKNOWN,) * 4,
        )
        for run in content
    ]
