"""The section about routing: how often each expert of each layer was selected, with entropies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.sizes import count_text, divide_up
from moepack.report.html.drawing import COLOURS, MUTED, draw
from moepack.report.html.facts import CountTable, ReportFacts
from moepack.report.html.maps import colours, map_symbol
from moepack.report.html.section import DataTable, MissingSection, PageSection, Picture, Ramp
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, number_text, rate_text, share_text
from moepack.traces.analysis.concentration import Concentration

TITLE = "Which experts are used"
_HOTTEST, _NUMBERED = "heat-hottest", "heat-numbered"
_TICKS = 12


def heat_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the counts of all experts as maps: the hottest first, and by number."""
    table = facts.counts
    if table is None:
        reason = "neither a trace nor the pack says how often experts were selected; "
        hint = "`moepack report MODEL --trace FILE -o report.html` adds it"
        return MissingSection(TITLE, reason + hint)
    judged = None if facts.routing is None else facts.routing.concentration
    total = int(np.maximum(table.counts, 0).sum())
    never = int((table.counts == 0).sum())
    count = int((table.counts >= 0).sum())
    tokens = None if judged is None else judged.token_count
    sample = "" if tokens is None else f" of {count_text(tokens, 'token')}"
    return PageSection(
        name="heat",
        title=TITLE,
        sentence=f"{count_text(total, 'selection')}{sample} by {table.origin}: {never:,} of "
        f"{count_text(count, 'expert')} were never selected.",
        figures=_figures(table, judged),
        tables=(_layers(table, judged),),
        unknown=_unknown(judged, total, count),
        is_choice=True,
        symbols=_maps(table),
    )


def _figures(table: CountTable, judged: Concentration | None) -> tuple[Picture, ...]:
    """Return both maps; their counts are in the page once."""
    most = rate_text(float(_multiples(table).max()))
    ramp = Ramp(colours(), "never", f"{most} × a uniform share")
    text = (
        f"{len(table.layers)} rows of up to {table.counts.shape[1]} cells, a cell for each expert, "
        "brighter with more selections. The table has figures of each layer."
    )
    cells: Any = table.counts.reshape(-1).tolist()
    pointer: dict[str, Any] = {
        "kind": "heat",
        "is_sorted": True,
        "layers": [*table.layers],
        "rows": len(table.layers),
        "columns": int(table.counts.shape[1]),
        "counts": cells,
    }
    return (
        Picture(
            _HOTTEST,
            "Hottest first",
            text,
            _drawing(_HOTTEST, "expert, hottest first in its layer", table, judged),
            ramp=ramp,
            pointer=pointer,
        ),
        Picture(
            _NUMBERED,
            "By number",
            text,
            _drawing(_NUMBERED, "number of the expert", table, judged),
            ramp=ramp,
            pointer={"like": _HOTTEST, "is_sorted": False},
        ),
    )


def _maps(table: CountTable) -> tuple[str, ...]:
    """Return both maps as symbols."""
    multiples = _multiples(table)
    levels = np.log2(1 + multiples) / np.log2(1 + max(float(multiples.max()), 1e-9))
    levels[table.counts < 0] = np.nan
    ordered = -np.sort(-levels, axis=1)  # what is no number stays at the end
    return map_symbol(_HOTTEST, ordered), map_symbol(_NUMBERED, levels)


def _multiples(table: CountTable) -> NDArray[np.float64]:
    """Return the counts as multiples of a uniform share of their layer [layers, experts]."""
    counts = np.maximum(table.counts, 0)
    widths = np.maximum((table.counts >= 0).sum(axis=1, keepdims=True), 1)
    multiples: NDArray[np.float64] = counts * widths / np.maximum(counts.sum(1, keepdims=True), 1)
    return multiples


def _drawing(name: str, label: str, table: CountTable, judged: Concentration | None) -> Any:
    layers = table.layers
    entropies: Mapping[int | None, float] = {}
    if judged is not None:
        entropies = {skew.layer: skew.entropy for skew in judged.layers}

    def paint(figure: Any) -> Any:
        columns = 2 if entropies else 1
        ratios = [5, 1][:columns]
        axes = figure.subplots(
            1, columns, squeeze=False, sharey=True, gridspec_kw={"width_ratios": ratios}
        )[0]
        left = axes[0]
        left.set_xlim(0, table.counts.shape[1])
        left.set_ylim(len(layers), 0)
        rows = range(0, len(layers), divide_up(len(layers), _TICKS))
        left.set_yticks([row + 0.5 for row in rows], [str(layers[row]) for row in rows])
        left.xaxis.get_major_locator().set_params(integer=True)
        left.set_xlabel(label)
        left.set_ylabel("layer")
        left.spines[:].set_visible(False)
        if entropies:
            values = [entropies.get(layer, float("nan")) for layer in layers]
            right = axes[1]
            places = [row + 0.5 for row in range(len(layers))]
            right.plot(values, places, color=COLOURS["c1"], linewidth=1.4)
            right.axvline(1, color=MUTED, linewidth=0.8, linestyle=":")
            least = min(0.9, *(value for value in values if value == value))
            right.set_xlim(max(0, least - 0.02), 1.005)
            right.set_xticks([round(max(0, least), 2), 1])
            right.set_xlabel("entropy")
            right.grid(axis="x")
            right.tick_params(axis="y", length=0)
        return left

    height = min(4.6, max(1.6, 0.7 + 0.05 * len(layers)))
    return draw(name, (height, height), paint, name)


def _layers(table: CountTable, judged: Concentration | None) -> DataTable:
    skews = {} if judged is None else {skew.layer: skew for skew in judged.layers}
    rows = []
    for layer, counts in zip(table.layers, table.counts, strict=True):
        skew = skews.get(layer)
        hottest = int(counts.argmax())
        total = int(np.maximum(counts, 0).sum())
        rows.append(
            (
                str(layer),
                UNKNOWN if skew is None else f"{skew.entropy:.3f}",
                UNKNOWN if skew is None else f"{skew.gini:.3f}",
                number_text(int((counts == 0).sum())),
                str(hottest) if total else UNKNOWN,
                share_text(int(counts[hottest]) / total if total else None),
            )
        )
    names = ("layer", "entropy", "Gini", "never", "hottest expert", "its share")
    return DataTable("By layer", Table(tuple(map(Column, names)), rows))


def _unknown(judged: Concentration | None, total: int, count: int) -> tuple[str, ...]:
    lines = []
    if judged is None:
        lines.append("Counts alone say nothing of tokens that come later.")
    elif not judged.has_expert_counts:
        lines.append(
            "The number of experts of a layer is assumed from the highest that was selected."
        )
    if total < 20 * count:
        lines.append(
            f"There are {total / max(count, 1):.1f} selections an expert: with so few, chance "
            "looks like preference, and entropy looks lower than it is."
        )
    return tuple(lines)
