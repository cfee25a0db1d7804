"""The section about measurements: a drive, the gain of a pack, runs of a model."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.bench.drive import SurfacePoint
from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.common.sizes import size_text
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.rates import KIND_WORDS
from moepack.report import measure_text
from moepack.report.html.drawing import dot, line, log_size_axis, number_axis, picture
from moepack.report.html.section import DataTable, Key, PageSection, Picture, ReportFacts
from moepack.report.page import Block, Column, Table
from moepack.report.values import UNKNOWN, length_text, number_text, rate_text, share_text
from moepack.running.serving.run_facts import RunFacts

_DEPTH_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7")
_RUNS = (
    *(Column("file", "l"), Column("mode", "l"), Column("memory for experts"), Column("tok/s")),
    *(Column("hits"), Column("read a token"), Column("waiting"), Column("tokens")),
)


def measured_section(facts: ReportFacts) -> PageSection | str:
    """Draw the measured surfaces, and write the runs."""
    if not facts.runs:
        reason = "no file of a measurement was given"
        hint = "`moepack bench PACK --json > bench.json` makes one, and"
        return f"{reason}; {hint} `moepack report PACK --run bench.json -o report.html` adds it"
    figures: list[Picture] = []
    tables: list[DataTable] = []
    blocks: list[Block] = []
    sentences, runs = [], []
    for number, file in enumerate(facts.runs):
        content = file.facts
        if isinstance(content, BenchReport):
            sentences.append(content.verdict)
            for order in dict.fromkeys(point.order for point in content.surface):
                points = [point for point in content.surface if point.order == order]
                figures.append(_surface(f"surface-{number}-{order}", order, points))
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
        figures=figures,
        tables=tables,
        blocks=blocks,
    )


def _surface(name: str, order: str, points: Sequence[SurfacePoint]) -> Picture:
    across = log_size_axis("size of a read", (point.length for point in points))
    fastest = max(points, key=lambda point: point.bytes_per_second)
    up = number_axis("MiB/s", fastest.bytes_per_second / (1 << 20))
    depths = sorted({point.depth for point in points})
    content, keys = [], []
    for depth, colour in zip(depths, _DEPTH_COLOURS, strict=False):
        key = Key(f"{depth} in flight", colour)
        keys.append(key)
        rates = sorted(
            (p.length, p.bytes_per_second / (1 << 20)) for p in points if p.depth == depth
        )
        content.append(line(across, up, key, rates))
        for length, rate in rates:
            text = f"{size_text(length)}, {key.label}: {rate:,.4g} MiB/s"
            content.append(dot(across, up, key, length, rate, text))
    return Picture(
        name,
        f"The drive, {order} reads",
        f"A line for each number of reads in flight, by the size of a read; the fastest is "
        f"{size_text(round(fastest.bytes_per_second))}/s with {fastest.depth} of "
        f"{size_text(fastest.length)}.",
        picture(12, across, up, *content),
        keys=keys,
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
