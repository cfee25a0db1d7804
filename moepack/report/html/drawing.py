"""Drawings for a page: matplotlib's SVG with the page's own colours and fonts.

Each is drawn twice, for wide and for narrow windows, with letters of the same size.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from moepack.report.html.section import Drawing

WIDE, NARROW = 7.4, 3.8
"""The widths of a drawing in inches; 72 points of it are about 92 pixels of the page."""

COLOURS = {
    "ink": "#010101",
    "muted": "#020202",
    "grid": "#030303",
    "paper": "#040404",
    **{f"c{number}": f"#0505{number:02}" for number in range(1, 9)},
}
"""Colours of the style sheet, by the names that stand for them while a picture is drawn."""

INK, MUTED, GRID, PAPER = (COLOURS[name] for name in ("ink", "muted", "grid", "paper"))

_NAMES = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "font.size": 8.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 3.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name begins no formula
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
}

Paint = Callable[[Any], Any]
"""Draws into a figure of matplotlib, and returns the axes that a pointer is over."""


def draw(name: str, heights: Sequence[float], paint: Paint, symbol: str | None = None) -> Drawing:
    """Draw a picture twice; `heights` are inches, of the wide and the narrow one.

    If `symbol` names a map of the page, it lies under the axes that `paint` returns.
    """
    wide, wide_box = _svg(f"{name}-wide", (WIDE, heights[0]), paint, symbol)
    narrow, narrow_box = _svg(f"{name}-narrow", (NARROW, heights[-1]), paint, symbol)
    return Drawing(wide, narrow, wide_box, narrow_box)


def is_narrow(figure: Any) -> bool:
    """Return whether a figure is the narrow one of two."""
    return float(figure.get_figwidth()) < (WIDE + NARROW) / 2


def gib_axis(axis: Any, lengths: Sequence[int]) -> None:
    """Give a horizontal axis of GiB logarithmic steps with plain labels, for some lengths."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    steps = [length / (1 << 30) for length in lengths]
    axis.set_xlim(min(steps), max(steps) if max(steps) > min(steps) else 2 * min(steps))
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: gib_text(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())


def bytes_axis(axis: Any, most: int) -> None:
    """Give a horizontal axis of bytes, from 0 to `most`, steps that are round in their unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit = max(unit for unit in (1, 1 << 10, 1 << 20, 1 << 30) if unit <= max(most / 4, 1))
    axis.set_xlim(0, max(most, 1))
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 4, 5, 10]).tick_values(0, max(most, 1) / unit)
    axis.set_xticks([tick * unit for tick in ticks if tick * unit <= most])
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: gib_text(value / (1 << 30)) if value else "0")
    )


def gib_text(gibs: float) -> str:
    """Write a number of GiB for an axis: `8 GiB`, `512 MiB`."""
    for factor, unit in ((1, "GiB"), (1 << 10, "MiB"), (1 << 20, "KiB")):
        if gibs * factor >= 1:
            return f"{float(f'{gibs * factor:.3g}'):,.6g} {unit}"
    return f"{gibs * (1 << 30):.0f} B"


def number_axis(axis: Any) -> None:
    """Give a vertical axis numbers from 0 on, with commas."""
    from matplotlib.ticker import FuncFormatter

    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.8g}"))


def percent_axis(axis: Any) -> None:
    """Give a vertical axis of shares percentages from 0 to 100, and lines."""
    axis.set_ylim(0, 1)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    axis.grid(axis="y")


def _svg(
    name: str, size: tuple[float, float], paint: Paint, symbol: str | None
) -> tuple[str, tuple[float, ...]]:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its fonts lack some letters: the page has others
        matplotlib.rcdefaults()
        # Names in a drawing follow from its content and this, not from chance.
        settings: Any = matplotlib.rcParams
        settings.update({**_SETTINGS, "svg.hashsalt": name})
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = paint(figure)
        figure.draw_without_rendering()
        area = axes.get_position()
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    width, height = size[0] * 72, size[1] * 72
    map_use = (
        ""
        if symbol is None
        else (
            f'<use href="#{symbol}" x="{area.x0 * width:.2f}" y="{(1 - area.y1) * height:.2f}" '
            f'width="{area.width * width:.2f}" height="{area.height * height:.2f}"/>'
        )
    )
    box = tuple(round(float(one), 5) for one in (area.x0, 1 - area.y1, area.x1, 1 - area.y0))
    return _for_page(output.getvalue(), map_use), box


def _for_page(svg: str, first: str) -> str:
    """Return a drawing as part of a page, with `first` under everything else."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    assert view_box, "matplotlib states the size of a drawing"
    body = svg[svg.index(">") + 1 :]
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # the same names stand in every drawing
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    body = re.sub(r"#0[1-5][0-9]{4}", lambda match: _NAMES.get(match[0], match[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    body = re.sub(r"(\d+\.\d\d)\d+", r"\1", body)
    return f'<svg viewBox="{view_box[1]}" aria-hidden="true" focusable="false">{first}{body}'
