"""The section about a forecast: the speed with its band, and the terms of a token's time."""

from __future__ import annotations

from typing import Any

from moepack.planning.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.report import forecast_text
from moepack.report.html.drawing import COLOURS, PAPER, draw, gib_axis, number_axis
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, MissingSection, PageSection, Picture
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, rate_text, seconds_text, share_text

TITLE = "How fast it will be"
_BAND = Key("nine runs of ten", "c1", "band")
_LIKELY = Key("forecast", "c1")
_MISFIT = Key("does not fit", "c1", "hollow")
_TERM_COLOURS = {"vram": "c3", "memory": "c1", "drive": "c2", "link": "c4", "layers": "c6"}
_TERM_NAMES = {"vram": "VRAM", "link": "GPU's link"}


def forecast_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the speeds that are forecast, and the time of a token by its terms."""
    forecast, sweep = facts.forecast, facts.sweep
    if forecast is None:
        problem = facts.problems.get("forecast", "that takes the bandwidths of a machine")
        hint = "`moepack report MODEL --machine FILE -o report.html` adds it"
        return MissingSection(TITLE, f"{problem}; {hint}")
    one = forecast.forecasts[0]
    figures, tables = [], []
    if sweep is not None and _is_drawn(sweep):
        figures.append(_speeds(sweep))
        tables.append(_table(sweep))
    if any(term.seconds for term in one.terms):
        figures.append(_terms(one))
        tables.append(DataTable("The time of a token", forecast_text.terms(one), place="below"))
    headline: tuple[tuple[str, str], ...] = ()
    if one.tokens_per_second is not None:
        band = f"tok/s forecast, {rate_text(one.lowest)} to {rate_text(one.highest)}"
        headline = ((rate_text(one.tokens_per_second), band),)
    return PageSection(
        name="forecast",
        title=TITLE,
        sentence=_sentence(forecast, one),
        figures=tuple(figures),
        tables=tuple(tables),
        blocks=(f"Prompt of {forecast_text.prompt_words(one.prompt)}.",),
        unknown=_unknown(forecast, one),
        headline=headline,
    )


def _sentence(forecast: ForecastFacts, one: SpeedFacts) -> str:
    machine = f"On {forecast.machine}: " if forecast.machine else ""
    return f"{machine}{forecast_text.speed_words(one)}; {forecast_text.mode_words(one)}."


def _is_drawn(sweep: ForecastFacts) -> bool:
    speeds = [one for one in sweep.forecasts if one.tokens_per_second is not None]
    return len(speeds) > 1


def _speeds(sweep: ForecastFacts) -> Picture:
    forecasts = [one for one in sweep.forecasts if one.tokens_per_second is not None]
    streams = any(one.budget_length is not None for one in forecasts)
    cause = "memory for experts" if streams else "layers with experts in memory"
    first, last = forecasts[0], forecasts[-1]
    text = (
        f"A line with a band, by {cause}: from {rate_text(first.tokens_per_second)} tok/s to "
        f"{rate_text(last.tokens_per_second)} tok/s."
    )
    keys = (_LIKELY, _BAND, *([_MISFIT] if any(one.fits is False for one in forecasts) else []))

    def paint(figure: Any) -> Any:
        axis = figure.add_subplot()
        places = [
            (one.budget_length or 0) / (1 << 30) if streams else one.cpu_layer_count or 0
            for one in forecasts
        ]
        lows, highs = (
            [getattr(one, name) or 0 for one in forecasts] for name in ("lowest", "highest")
        )
        likely = [one.tokens_per_second or 0 for one in forecasts]
        colour = COLOURS["c1"]
        axis.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axis.plot(places, likely, color=colour)
        for place, speed, one in zip(places, likely, forecasts, strict=True):
            face = PAPER if one.fits is False else colour
            axis.plot([place], [speed], "o", color=colour, markerfacecolor=face, markersize=4.5)
        if streams:
            gib_axis(axis, [one.budget_length or 1 for one in forecasts])
        else:
            axis.set_xlim(min(places), max(places))
            axis.xaxis.get_major_locator().set_params(integer=True)
        number_axis(axis)
        axis.grid(axis="y")
        axis.set_xlabel(cause)
        axis.set_ylabel("tokens a second")
        return axis

    picture = draw("forecast", (3.0, 3.0), paint)
    return Picture("forecast", f"Tokens a second, by {cause}", text, picture, keys)


def _table(sweep: ForecastFacts) -> DataTable:
    """Write a row for each forecast, as narrow as fits beside the picture."""
    streams = any(one.budget_length is not None for one in sweep.forecasts)
    rows = [
        (
            length_text(one.budget_length) if streams else str(one.cpu_layer_count),
            length_text(one.vram_length) if one.vram_length else "",
            length_text(one.memory_length),
            rate_text(one.tokens_per_second),
            f"{rate_text(one.lowest)} to {rate_text(one.highest)}",
            {True: "yes", False: "no", None: UNKNOWN}[one.fits],
        )
        for one in sweep.forecasts
    ]
    names = ("budget" if streams else "layers", "VRAM", "memory", "tok/s", "range", "fits")
    columns = tuple(map(Column, names))
    return DataTable("Tokens a second", Table(columns, rows))


def _terms(one: SpeedFacts) -> Picture:
    terms = [term for term in one.terms if term.seconds]
    total = sum(term.seconds or 0 for term in terms)
    keys = tuple(
        Key(
            f"{_TERM_NAMES.get(term.name, term.name)} {share_text((term.seconds or 0) / total)}",
            _TERM_COLOURS.get(term.name, "c5"),
            "fill",
        )
        for term in terms
    )

    def paint(figure: Any) -> Any:
        axis = figure.add_subplot()
        start = 0.0
        for term in terms:
            length = (term.seconds or 0) * 1e3
            colour = COLOURS[_TERM_COLOURS.get(term.name, "c5")]
            axis.barh(0, length, left=start, height=1, color=colour, edgecolor=PAPER)
            start += length
        axis.set_xlim(0, total * 1e3)
        axis.set_ylim(-0.5, 0.5)
        axis.xaxis.get_major_locator().set_params(nbins=5)
        axis.set_yticks([])
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.set_xlabel("milliseconds of a token")
        return axis

    words = ", ".join(key.label for key in keys)
    picture = draw("terms", (0.95, 0.95), paint)
    return Picture(
        "terms", "The time of a token, by its terms", f"One bar: {words}.", picture, keys
    )


def _unknown(forecast: ForecastFacts, one: SpeedFacts) -> tuple[str, ...]:
    lines = [f"{line[0].upper()}{line[1:]}." for line in one.warnings]
    if one.misses_from == "even router":
        lines.append("Misses are those of a uniform router, the worst case: a trace says more.")
    if not one.receipt_count:
        lines.append("No measured run of this machine was used: the band is from other machines.")
    if forecast.next_receipt is not None:
        lines.append(f"A measured run makes it more certain: `{forecast.next_receipt}`.")
    if one.prompt.seconds is None:
        lines.append(f"The time of a prompt, {seconds_text(None)}: {one.prompt.reason}.")
    return tuple(lines)
