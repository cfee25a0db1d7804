"""Pictures as inline SVG, drawn once: the area between the axes is as wide as its window allows.

Places are shares of that area, so letters and strokes keep their size; ticks and labels lie outside
it, in the margins. Colours are variables of the style sheet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.sizes import divide_up, size_text
from moepack.report.html.section import Key

COLOUR_COUNT = 16
"""The colours of maps, `--m0` to `--m15` in the style sheet."""
_TICK_COUNT = 6
_LETTER_WIDTH = 0.65
"""The width of a letter or digit in em, with some to spare."""
_LEAST_WIDTH = 48
"""The letters that fit into the area in the narrowest window."""
_STRETCHED = '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">'


class Axis(NamedTuple):
    """An axis with ticks (values and their texts), which may be logarithmic."""

    label: str
    least: float
    most: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the place of a value along the axis, from 0 to 1."""
        ends = (self.least, self.most)
        if self.is_log:
            value, ends = math.log(value), (math.log(ends[0]), math.log(ends[1]))
        return (value - ends[0]) / (ends[1] - ends[0])


def share_axis(label: str) -> Axis:
    """Return an axis of percentages."""
    return Axis(label, 0, 1, ((0, "0"), (0.25, "25"), (0.5, "50"), (0.75, "75"), (1, "100 %")))


def number_axis(
    label: str,
    most: float,
    write: Callable[[float], str] = lambda value: f"{value:,.9g}",
    unit: float = 1,
    least_step: float = 0,
) -> Axis:
    """Return an axis from 0 in round steps of a unit."""
    most = most or unit
    step = most / unit / (_TICK_COUNT - 1)
    power = 10 ** math.floor(math.log10(step))
    step = max(least_step, next(power * times for times in (1, 2, 5, 10) if power * times >= step))
    values = [step * unit * number for number in range(int(most / unit / step + 1e-9) + 1)]
    return Axis(label, 0, most, [(value, write(value)) for value in values])


def size_axis(most: int) -> Axis:
    """Return an axis of bytes from 0, in steps that are round in their unit."""
    unit = max(unit for unit in (1, 1 << 10, 1 << 20, 1 << 30) if unit <= max(most / 4, 1))
    return number_axis("", most, _size, unit)


def log_size_axis(label: str, lengths: Iterable[int]) -> Axis:
    """Return a logarithmic axis for some lengths, with ticks at powers of two, else at its ends."""
    ordered = sorted(lengths)
    least, most = ordered[0], max(ordered[-1], ordered[0] + 1)
    powers = range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1)
    values = [2**power for power in powers[:: divide_up(len(powers), _TICK_COUNT) or 1]]
    if len(values) < 2:
        values = [least, most]
    return Axis(label, least, most, [(value, _size(value)) for value in values], is_log=True)


def _size(length: float) -> str:
    return size_text(round(length)).replace(".0 ", " ") if length else "0"


def picture(height: float, across: Axis, up: Axis, *content: str, has_grid: bool = True) -> str:
    """Return a picture whose area is `height` rem high: axes, and content between them."""
    margin = max([2, *(_LETTER_WIDTH * len(text) + 1 for _, text in up.ticks)])
    pieces = []
    for value, text in up.ticks:
        y = _percent(1 - up.share(value))
        if has_grid:
            pieces.append(f'<line x2="100%" y1="{y}" y2="{y}"/>')
        pieces.append(f'<text class="end" x="-0.6em" y="{y}" dy="0.35em">{escape(text)}</text>')
    for value, text in across.ticks:
        x = _percent(across.share(value))
        pieces.append(f'<text x="{x}" y="100%" dy="1.5em">{escape(text)}</text>')
    if across.label:
        pieces.append(f'<text x="50%" y="100%" dy="3em">{escape(across.label)}</text>')
    if up.label:
        pieces.append(f'<text class="start" x="-{margin:.1f}em" y="-2em">{escape(up.label)}</text>')
    margins = f"{3 if up.label else 0.3}em 2em {4 if across.label else 2}em {margin:.1f}em"
    style = f"height: {height:g}rem; width: calc(100% - {margin + 2:.1f}em); margin: {margins}"
    body = "".join([*pieces, *content])
    return f'<svg class="area" style="{style}" aria-hidden="true" focusable="false">{body}</svg>'


def line(across: Axis, up: Axis, key: Key, points: Iterable[tuple[float, float | None]]) -> str:
    """Return a line through points in the look of its key; those without a value are left out."""
    return _path(across, up, key, ((x, y) for x, y in points if y is not None))


def band(
    across: Axis, up: Axis, key: Key, points: Sequence[tuple[float, float | None, float | None]]
) -> str:
    """Return a band between the lower and the higher values of points."""
    edge = [(x, low or 0) for x, low, _ in points]
    return _path(across, up, key, edge + [(x, high or 0) for x, _, high in reversed(points)])


def _path(across: Axis, up: Axis, key: Key, points: Iterable[tuple[float, float]]) -> str:
    places = (f"{1e3 * across.share(x):.1f} {1e3 * (1 - up.share(y)):.1f}" for x, y in points)
    path = f'<path class="{key.look}" style="--colour: var(--{key.colour})" d="M{"L".join(places)}"'
    return f"{_STRETCHED}{path}/></svg>"


def dot(across: Axis, up: Axis, key: Key, x: float, y: float, title: str) -> str:
    """Return a point in the look of its key, with a text for the pointer."""
    place = f'cx="{_percent(across.share(x))}" cy="{_percent(1 - up.share(y))}"'
    look = f'class="{key.look}" style="--colour: var(--{key.colour})"'
    return f'<circle {place} r="4" {look}><title>{escape(title)}</title></circle>'


def mark(across: Axis, value: float, text: str) -> str:
    """Return a vertical line at a value, with its text above."""
    x = _percent(across.share(value))
    return (
        f'<line class="limit" x1="{x}" x2="{x}" y2="100%"/><text x="{x}" y="-0.5em">{text}</text>'
    )


def stacked_bars(
    across: Axis, rows: Mapping[str, Iterable[tuple[Key, float, str]]], height: float
) -> str:
    """Return bars of `height` rem under one another, by the names of their rows.

    Each is made of pieces: their keys, lengths, and amounts for the pointer. Labels are written
    into the pieces with room for them.
    """
    content = []
    up = Axis("", len(rows), 0, [(row + 0.5, name) for row, name in enumerate(rows)])
    for row, pieces in enumerate(rows.values()):
        start = 0.0
        for key, length, amount in pieces:
            left, width = across.share(start), across.share(length)
            y, high = _percent((row + 0.1) / len(rows)), _percent(0.8 / len(rows))
            place = f'x="{_percent(left)}" y="{y}" width="{_percent(width)}" height="{high}"'
            title = escape(f"{key.label}: {amount}")
            content.append(
                f'<rect {place} style="fill: var(--{key.colour})"><title>{title}</title></rect>'
            )
            if width * _LEAST_WIDTH > len(key.label) + 1:
                x, y = _percent(left + width / 2), _percent((row + 0.5) / len(rows))
                ink = "ink" if key.colour == "grid" else "paper"
                content.append(
                    f'<text class="inner" style="fill: var(--{ink})" x="{x}" y="{y}" dy="0.35em">'
                    f"{escape(key.label)}</text>"
                )
            start += length
    return picture(height * len(rows), across, up, *content, has_grid=False)


def cell_map(levels: NDArray[Any], label: str, up: Axis, height: float) -> str:
    """Return a map with a cell for each of `levels` [rows, columns], from 0 to 1.

    What is not a number is left empty. Cells of one colour are strokes of one path.
    """
    rows, columns = levels.shape
    steps = np.nan_to_num(np.clip(levels, 0, 1)) * (COLOUR_COUNT - 1)
    colours = np.where(np.isnan(levels), -1, np.rint(steps)).astype(int)
    strokes: dict[int, list[str]] = defaultdict(list)
    ends: dict[int, tuple[int, int]] = {}
    for row in range(rows):
        changes = (*np.flatnonzero(np.diff(colours[row], prepend=-2)).tolist(), columns)
        for start, end in pairwise(changes):
            colour = int(colours[row, start])
            x, y = ends.get(colour, (0, 0))
            strokes[colour].append(f"m{start - x} {row - y}h{end - start}")
            ends[colour] = (end, row)
    strokes.pop(-1, None)
    paths = "".join(
        f'<path style="stroke: var(--m{colour})" d="{"".join(runs)}"/>'
        for colour, runs in sorted(strokes.items())
    )
    box = f'viewBox="0 -0.5 {columns} {rows}" preserveAspectRatio="none"'
    across = number_axis(label, columns, least_step=1)
    cells = f'<svg class="map" {box}>{paths}</svg>'
    return picture(height, across, up, cells, has_grid=False)


def row_ticks(texts: Sequence[str], places: Sequence[float]) -> list[tuple[float, str]]:
    """Return ticks for up to a dozen of many rows."""
    step = divide_up(len(texts), 12) or 1
    return list(zip(places, texts, strict=True))[::step]


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
