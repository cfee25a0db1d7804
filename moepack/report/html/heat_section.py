"""The section about routing: how often each expert of each layer was selected."""

from __future__ import annotations

from typing import Any

import numpy as np

from moepack.common.sizes import count_text
from moepack.report.html.drawing import Axis, cell_map, row_ticks
from moepack.report.html.facts import CountTable, ReportFacts
from moepack.report.html.section import DataTable, PageSection, Picture, adding
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN, rate_text, share_text

_HOTTEST = "heat-hottest"


def heat_section(facts: ReportFacts) -> PageSection | str:
    """Draw the counts of all experts as maps: the hottest first, and by number."""
    table = facts.counts
    if table is None:
        reason = "neither a trace nor the pack says how often experts were selected"
        return adding(reason, "MODEL --trace FILE")
    judged = None if facts.routing is None else facts.routing.concentration
    total = int(np.maximum(table.counts, 0).sum())
    never = int((table.counts == 0).sum())
    count = int((table.counts >= 0).sum())
    tokens = None if judged is None else judged.token_count
    sample = "" if tokens is None else f" of {count_text(tokens, 'token')}"
    unknown = []
    if judged is None:
        unknown.append("counts alone say nothing of tokens that come later")
    elif not judged.has_expert_counts:
        unknown.append("the experts of a layer are assumed from the highest that was selected")
    if total < 20 * count:
        unknown.append(
            f"there are {total / max(count, 1):.1f} selections an expert: with so few, chance "
            "looks like preference, and entropy looks lower than it is"
        )
    return PageSection(
        name="heat",
        sentence=f"{count_text(total, 'selection')}{sample} by {table.origin}: {never:,} of "
        f"{count_text(count, 'expert')} were never selected",
        figures=_figures(table),
        tables=(_layers(table),),
        unknown=tuple(unknown),
        is_choice=True,
    )


def _figures(table: CountTable) -> tuple[Picture, ...]:
    """Draw both maps; their counts are in the page once."""
    rows, columns = table.counts.shape
    counts = np.maximum(table.counts, 0)
    widths = np.maximum((table.counts >= 0).sum(axis=1, keepdims=True), 1)
    multiples = counts * widths / np.maximum(counts.sum(1, keepdims=True), 1)
    levels = np.log2(1 + multiples) / np.log2(1 + max(float(multiples.max()), 1e-9))
    levels[table.counts < 0] = np.nan
    ordered = -np.sort(-levels, axis=1)  # what is no number stays at the end
    middles = [row + 0.5 for row in range(rows)]
    up = Axis("layer", rows, 0, row_ticks([*map(str, table.layers)], middles))
    height = min(20, max(5, 0.23 * rows))
    ramp = ("never", f"{rate_text(float(multiples.max()))} × a uniform share")
    text = (
        f"{rows} rows of up to {columns} cells, a cell for each expert, brighter with more "
        "selections. The table has figures of each layer."
    )
    cells: Any = table.counts.reshape(-1).tolist()
    pointer: dict[str, Any] = {
        "kind": "heat",
        "is_sorted": True,
        "layers": [*table.layers],
        "rows": rows,
        "columns": columns,
        "counts": cells,
    }
    sorted_map = cell_map(ordered, "expert, hottest first in its layer", up, height)
    numbered_map = cell_map(levels, "number of the expert", up, height)
    like: dict[str, Any] = {"like": _HOTTEST, "is_sorted": False}
    return (
        Picture(_HOTTEST, "Hottest first", text, sorted_map, ramp=ramp, pointer=pointer),
        Picture("heat-numbered", "By number", text, numbered_map, ramp=ramp, pointer=like),
    )


def _layers(table: CountTable) -> DataTable:
    rows = []
    for layer, counts in zip(table.layers, table.counts, strict=True):
        hottest, never = int(counts.argmax()), int((counts == 0).sum())
        total = int(np.maximum(counts, 0).sum())
        share = int(counts[hottest]) / total if total else None
        rows.append(
            (str(layer), f"{never:,}", str(hottest) if total else UNKNOWN, share_text(share))
        )
    names = ("layer", "never", "hottest expert", "its share")
    return DataTable("By layer", Table(tuple(map(Column, names)), rows))
