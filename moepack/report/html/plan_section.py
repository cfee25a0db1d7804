"""The sections about a machine: its memories, and the speed that is forecast and measured."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.common.sizes import size_text
from moepack.planning.forecasting.facts import SpeedFacts
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.rates import KIND_WORDS
from moepack.planning.placing.facts import DeviceFacts
from moepack.planning.placing.offload import PACK
from moepack.report import measure_text, plan_text
from moepack.report.html.drawing import (
    band,
    dot,
    line,
    log_size_axis,
    number_axis,
    picture,
    size_axis,
    stacked_bars,
)
from moepack.report.html.section import DataTable, Key, PageSection, Picture, ReportFacts, adding
from moepack.report.page import Block, Column, Table
from moepack.report.values import (
    UNKNOWN,
    length_text,
    number_text,
    rate_text,
    seconds_text,
    share_text,
)
from moepack.running.serving.run_facts import RunFacts

_CONTENTS = (
    Key("dense", "c2", "fill"),
    Key("context", "c3", "fill"),
    Key("experts", "c1", "fill"),
    Key("computing", "c4", "fill"),
    Key("left", "grid", "fill"),
)


def placement_section(facts: ReportFacts) -> PageSection | str:
    """Draw the contents of the memories, and write the command lines."""
    placement = facts.placement
    if placement is None:
        problem = facts.problems.get("placement", "that takes the memories of a machine")
        return adding(problem, "MODEL --machine FILE")
    experts = ", ".join(plan_text.expert_places(placement.option))
    engine = "moepack run" if placement.engine == PACK else placement.engine
    pieces = {device.name: _contents(device) for device in placement.devices}
    texts, longest = [], 0
    for device in placement.devices:
        contents = pieces[device.name]
        sizes = ", ".join(f"{key.label} {size}" for key, length, size in contents if length)
        texts.append(f"{device.name} of {size_text(device.length)}: {sizes}")
        longest = max(longest, device.length, sum(length for _, length, _ in contents))
    figure = Picture(
        "placement",
        "Bytes in each memory",
        f"A bar for each memory. {'; '.join(texts)}.",
        stacked_bars(size_axis(longest), pieces, 2.2),
        keys=_CONTENTS,
    )
    return PageSection(
        name="placement",
        sentence=f"under {engine}, with {placement.context:,} tokens of context: experts take "
        f"{experts or 'no bytes'}",
        figures=[figure],
        blocks=plan_text.placement(placement).blocks,
    )


def _contents(device: DeviceFacts) -> list[tuple[Key, int, str]]:
    weights = (device.dense_length, device.context_length, device.expert_length)
    lengths = (*weights, device.compute_length, max(0, device.left_length))
    return [
        (key, length, size_text(length)) for key, length in zip(_CONTENTS, lengths, strict=True)
    ]


_BAND = Key("nine runs of ten", "c1", "band")
_LIKELY = Key("forecast", "c1")
_MISFIT = Key("does not fit", "c1", "hollow")


def forecast_section(facts: ReportFacts) -> PageSection | str:
    """Draw the speeds that are forecast."""
    forecast = facts.forecast
    if forecast is None:
        problem = facts.problems.get("forecast", "that takes the bandwidths of a machine")
        return adding(problem, "MODEL --machine FILE")
    one = forecast.forecasts[0]
    swept = () if facts.sweep is None else facts.sweep.forecasts
    speeds = [speed for speed in swept if speed.tokens_per_second is not None]
    figures, headline, unknown = [], [], []
    blocks = list(plan_text.forecast(forecast).blocks)
    if len(speeds) > 1:
        figures.append(_speeds(speeds))
        blocks.insert(0, plan_text.speeds(swept))
    if one.tokens_per_second is not None:
        label = f"tok/s forecast, {rate_text(one.lowest)} to {rate_text(one.highest)}"
        headline.append((rate_text(one.tokens_per_second), label))
    if one.misses_curve is not None:
        unknown.append(f"misses follow the curve of {one.misses_curve}: a trace says more")
    if forecast.next_receipt is not None:
        unknown.append(f"a measured run makes it more certain: `{forecast.next_receipt}`")
    if one.prompt.seconds is None:
        unknown.append(f"the time of a prompt, {seconds_text(None)}: {one.prompt.reason}")
    machine = f"on {forecast.machine}: " if forecast.machine else ""
    return PageSection(
        name="forecast",
        sentence=f"{machine}{plan_text.speed_words(one)}; {plan_text.mode_words(one)}",
        figures=figures,
        blocks=blocks,
        unknown=unknown,
        headline=headline,
    )


def _speeds(forecasts: Sequence[SpeedFacts]) -> Picture:
    if any(one.budget_length is not None for one in forecasts):
        values = [one.budget_length or 1 for one in forecasts]
        across = log_size_axis("memory for experts", values)
    else:
        values = [one.cpu_layer_count or 0 for one in forecasts]
        across = number_axis("layers with experts in memory", max(values), least_step=1)
    up = number_axis("tokens a second", max(one.highest or 0 for one in forecasts))
    likely = [one.tokens_per_second or 0 for one in forecasts]
    edges = [(x, one.lowest, one.highest) for x, one in zip(values, forecasts, strict=True)]
    content = [
        band(across, up, _BAND, edges),
        line(across, up, _LIKELY, zip(values, likely, strict=True)),
    ]
    keys = [_LIKELY, _BAND]
    for x, y, one in zip(values, likely, forecasts, strict=True):
        key = _MISFIT if one.fits is False else _LIKELY
        content.append(dot(across, up, key, x, y, f"{rate_text(y)} tok/s"))
        keys += [] if key in keys else [key]
    return Picture(
        "forecast",
        f"Tokens a second, by {across.label}",
        f"A line with a band, by {across.label}: from {rate_text(likely[0])} tok/s to "
        f"{rate_text(likely[-1])} tok/s.",
        picture(13, across, up, *content),
        keys=keys,
    )


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
