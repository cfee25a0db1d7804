"""The sections about a machine: the contents of its memories, and the speed that is forecast."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.common.sizes import size_text
from moepack.planning.forecasting.facts import SpeedFacts
from moepack.planning.placing.facts import DeviceFacts
from moepack.planning.placing.offload import PACK
from moepack.report import plan_text
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
from moepack.report.html.section import Key, PageSection, Picture, ReportFacts, adding
from moepack.report.values import rate_text, seconds_text

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
