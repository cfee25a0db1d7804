"""The section about a forecast: the speed with its band, and the terms of a token's time."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.planning.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.report import plan_text
from moepack.report.html.drawing import (
    band,
    dot,
    line,
    log_size_axis,
    number_axis,
    picture,
    stacked_bars,
)
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, PageSection, Picture, adding
from moepack.report.values import rate_text, seconds_text, share_text

_BAND = Key("nine runs of ten", "c1", "band")
_LIKELY = Key("forecast", "c1")
_MISFIT = Key("does not fit", "c1", "hollow")
_TERM_COLOURS = {"vram": "c3", "memory": "c1", "drive": "c2", "link": "c4", "layers": "c6"}
_TERM_NAMES = {"vram": "VRAM", "link": "GPU's link"}


def forecast_section(facts: ReportFacts) -> PageSection | str:
    """Draw the speeds that are forecast, and the time of a token by its terms."""
    forecast = facts.forecast
    if forecast is None:
        problem = facts.problems.get("forecast", "that takes the bandwidths of a machine")
        return adding(problem, "MODEL --machine FILE")
    one = forecast.forecasts[0]
    swept = () if facts.sweep is None else facts.sweep.forecasts
    speeds = [speed for speed in swept if speed.tokens_per_second is not None]
    figures, tables = [], []
    if len(speeds) > 1:
        figures.append(_speeds(speeds))
        tables.append(DataTable("Tokens a second", plan_text.speeds(swept), place="below"))
    if any(term.seconds for term in one.terms):
        figures.append(_terms(one))
    headline: tuple[tuple[str, str], ...] = ()
    if one.tokens_per_second is not None:
        label = f"tok/s forecast, {rate_text(one.lowest)} to {rate_text(one.highest)}"
        headline = ((rate_text(one.tokens_per_second), label),)
    machine = f"on {forecast.machine}: " if forecast.machine else ""
    return PageSection(
        name="forecast",
        sentence=f"{machine}{plan_text.speed_words(one)}; {plan_text.mode_words(one)}",
        figures=tuple(figures),
        tables=tuple(tables),
        blocks=plan_text.forecast(forecast).blocks,
        unknown=_unknown(forecast, one),
        headline=headline,
    )


def _speeds(forecasts: Sequence[SpeedFacts]) -> Picture:
    streams = any(one.budget_length is not None for one in forecasts)
    if streams:
        values = [one.budget_length or 1 for one in forecasts]
        across = log_size_axis("memory for experts", values)
    else:
        values = [one.cpu_layer_count or 0 for one in forecasts]
        across = number_axis("layers with experts in memory", max(values), least_step=1)
    up = number_axis("tokens a second", max(one.highest or 0 for one in forecasts))
    likely = [one.tokens_per_second or 0 for one in forecasts]
    edges = [(x, one.lowest, one.highest) for x, one in zip(values, forecasts, strict=True)]
    dots = [
        dot(across, up, _MISFIT if one.fits is False else _LIKELY, x, y, f"{rate_text(y)} tok/s")
        for x, y, one in zip(values, likely, forecasts, strict=True)
    ]
    lines = (
        band(across, up, _BAND, edges),
        line(across, up, _LIKELY, zip(values, likely, strict=True)),
    )
    misfit = (_MISFIT,) if any(one.fits is False for one in forecasts) else ()
    return Picture(
        "forecast",
        f"Tokens a second, by {across.label}",
        f"A line with a band, by {across.label}: from {rate_text(likely[0])} tok/s to "
        f"{rate_text(likely[-1])} tok/s.",
        picture(13, across, up, *lines, *dots),
        keys=(_LIKELY, _BAND, *misfit),
    )


def _terms(one: SpeedFacts) -> Picture:
    times = {term.name: term.seconds for term in one.terms if term.seconds}
    total = sum(times.values())
    pieces = [
        (
            Key(
                f"{_TERM_NAMES.get(name, name)} {share_text(seconds / total)}",
                _TERM_COLOURS.get(name, "c5"),
                "fill",
            ),
            seconds * 1e3,
            seconds_text(seconds),
        )
        for name, seconds in times.items()
    ]
    keys = tuple(key for key, _, _ in pieces)
    return Picture(
        "terms",
        "The time of a token, by its terms",
        f"One bar: {', '.join(key.label for key in keys)}.",
        stacked_bars(number_axis("milliseconds of a token", total * 1e3), {"": pieces}, 2.5),
        keys,
    )


def _unknown(forecast: ForecastFacts, one: SpeedFacts) -> tuple[str, ...]:
    lines = []
    if one.misses_from == "even router":
        lines.append("misses are those of a uniform router, the worst case: a trace says more")
    if forecast.next_receipt is not None:
        lines.append(f"a measured run makes it more certain: `{forecast.next_receipt}`")
    if one.prompt.seconds is None:
        lines.append(f"the time of a prompt, {seconds_text(None)}: {one.prompt.reason}")
    return tuple(lines)
