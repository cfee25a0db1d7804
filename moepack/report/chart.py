"""Pictures: a drive's surface, heat and coverage of experts, hit rates, forecasts.

They have the colours of pages, on white. Needs matplotlib, which is the extra `plot`.
"""

import contextlib
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from moepack.bench.drive import SurfacePoint
from moepack.common import extras
from moepack.common.errors import MachineError, RequestError
from moepack.common.escaping import one_line
from moepack.common.sizes import divide_up
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.storage.atomic import write_whole
from moepack.traces.simulation.facts import Simulation

SUFFIXES = (".svg", ".png")


def check(path: str) -> None:
    """Raise RequestError if `path` cannot be a picture, MachineError without matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise RequestError("not a picture", path=path, expected=" or ".join(SUFFIXES))
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        hint = extras.hint("plot")
        raise MachineError("plotting needs matplotlib", path=path, hint=hint) from None


def title_of(paths: Sequence[str]) -> str:
    """Return the names of files as a title, without their folders."""
    return ", ".join(os.path.basename(path.rstrip("/")) for path in paths)


def surface(points: Sequence[SurfacePoint], title: str, path: str) -> None:
    """Draw the points of `bench` into the file at `path`, SVG or PNG by its name.

    Throughput by read size, a line for each depth. Raises the errors of `check`, and MachineError
    if the file cannot be written.
    """
    orders = list(dict.fromkeys(point.order for point in points))
    with _figure(path, title, len(orders), sharey=True) as axes:
        for axis, order in zip(axes, orders, strict=True):
            ordered = [point for point in points if point.order == order]
            for depth in sorted({point.depth for point in ordered}):
                line = sorted((p.length, p.bytes_per_second) for p in ordered if p.depth == depth)
                lengths, speeds = zip(*line, strict=True)
                mibs = [speed / (1 << 20) for speed in speeds]
                axis.plot(lengths, mibs, marker="o", label=str(depth))
            ticks = sorted({point.length for point in ordered})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{length >> 10} KiB" for length in ticks], rotation=45)
            axis.set_xlabel("read size")
            axis.set_ylim(bottom=0)
            axis.grid()
            axis.set_title(f"{order} reads")
        axes[0].set_ylabel("MiB/s")
        axes[-1].legend(title="in flight", fontsize="small")


def heat(
    layers: Sequence[int], counts: Any, curves: Mapping[str, Sequence[float]], title: str, path: str
) -> None:
    """Draw counts [layers, experts] as a heat map, and coverage curves beside it.

    `layers` are the numbers of the rows. A curve has the covered share by the share of experts, in
    equal steps from 0 to 1. Raises as `surface` does.
    """
    with _figure(path, title, 2) as (left, right):
        picture = left.imshow(counts, aspect="auto", interpolation="nearest", cmap=_map())
        left.set_xlabel("expert, hottest first in its layer")
        left.set_ylabel("layer")
        rows = range(0, len(layers), divide_up(len(layers), 12))
        left.set_yticks(rows, [str(layers[row]) for row in rows])
        left.figure.colorbar(picture, ax=left, label="times a uniform share")
        for name, curve in curves.items():
            steps = [100 * n / (len(curve) - 1) for n in range(len(curve))]
            right.plot(steps, [100 * share for share in curve], label=name)
        _finish(right, "experts of each layer, %", "selections covered, %")


def hit_rates(facts: Simulation, title: str, path: str) -> None:
    """Draw LRU's hit rate by budget as a line, with a uniform router's, and other policies' points.

    Raises as `surface` does.
    """
    with _figure(path, title, 1) as (axis,):
        gibs = [point.budget_length / (1 << 30) for point in facts.curve]
        for name, field in (("lru", "decode_hit_rate"), ("lru, uniform router", "even_hit_rate")):
            rates = [getattr(point, field) for point in facts.curve]
            percents = [math.nan if rate is None else 100 * rate for rate in rates]
            axis.plot(gibs, percents, label=name)
        for policy in dict.fromkeys(one.policy for one in facts.results if one.policy != "lru"):
            points = sorted(
                (one.budget_length / (1 << 30), 100 * one.decode_hit_rate)
                for one in facts.results
                if one.policy == policy and one.decode_hit_rate is not None
            )
            if points:
                axis.plot(*zip(*points, strict=True), ".", label=policy)
        if facts.step_length is not None:
            axis.axvline(facts.step_length / (1 << 30), color=_colours()["muted"], linestyle=":")
        axis.set_xscale("log")
        _finish(axis, "memory for experts, GiB (dotted: use of a token)", "hit rate in decoding, %")


def speeds(facts: ForecastFacts, path: str) -> None:
    """Draw the speeds that are forecast, with their ranges, by layers or bytes in memory.

    What does not fit is hollow. Raises as `surface` does.
    """
    forecasts = [one for one in facts.forecasts if one.tokens_per_second is not None]
    streams = any(one.budget_length is not None for one in forecasts)
    positions = [
        (one.budget_length or 0) / (1 << 30) if streams else one.cpu_layer_count or 0
        for one in forecasts
    ]
    with _figure(path, facts.model, 1) as (axis,):
        lowest, highest, likely = (
            [getattr(one, name) or 0.0 for one in forecasts]
            for name in ("lowest", "highest", "tokens_per_second")
        )
        axis.fill_between(positions, lowest, highest, alpha=0.2, label="nine runs of ten")
        axis.plot(positions, likely, label="forecast")
        for fits, face in ((True, None), (False, "none")):
            points = [
                (position, speed)
                for position, speed, one in zip(positions, likely, forecasts, strict=True)
                if (one.fits is not False) == fits
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o", color="C0", markerfacecolor=face)
        across = "memory for experts, GiB" if streams else "layers whose experts are in memory (N)"
        axis.set_ylim(bottom=0)
        _finish(axis, across, "tokens a second")


def _finish(axis: Any, across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid()
    axis.legend(fontsize="small")


@contextlib.contextmanager
def _figure(path: str, title: str, count: int, **options: Any) -> Iterator[Any]:
    """Make a figure with `count` axes side by side, and write it when it was drawn."""
    check(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_style()):
        figure, axes = pyplot.subplots(
            1, count, figsize=(5.5 * count, 4.2), squeeze=False, **options
        )
        try:
            yield axes[0]
            # A dollar begins a formula.
            figure.suptitle(one_line(title).replace("$", r"\$"))
            figure.tight_layout()
            # Without a date, and names by chance, the same numbers give the same file.
            metadata = {"Date": None} if path.lower().endswith(".svg") else None
            drawn = io.BytesIO()
            figure.savefig(drawn, format=Path(path).suffix[1:], metadata=metadata)
            write_whole(path, drawn.getbuffer())
        finally:
            pyplot.close(figure)


def _style() -> Any:
    from matplotlib.rcsetup import cycler

    colours = _colours()
    roles = {
        "paper": ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"),
        "ink": ("text.color", "axes.labelcolor", "axes.titlecolor"),
        "muted": ("xtick.color", "ytick.color", "axes.edgecolor"),
        "grid": ("grid.color", "legend.edgecolor"),
    }
    style: dict[str, Any] = {key: colours[name] for name, keys in roles.items() for key in keys}
    lines = cycler(color=[colours[f"c{number}"] for number in range(1, 9)])
    return style | {"axes.prop_cycle": lines, "svg.hashsalt": "moepack"}


def _map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = _colours()
    return LinearSegmentedColormap.from_list("page", [colours[f"m{n}"] for n in range(16)])


def _colours() -> dict[str, str]:
    """Return the colours of pages on white paper, by their names."""
    style = resources.files("moepack.report").joinpath("html", "page.css").read_text()
    light, _, _ = style.partition("@media")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
