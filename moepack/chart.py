"""The surface of a drive as a picture: throughput by read size, a line for each depth.

Needs matplotlib, which is an extra: `pip install "moepack[plot]"`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moepack.errors import MachineError, RequestError

SUFFIXES = (".svg", ".png")


def check(path: str) -> None:
    """Raise RequestError where `path` cannot be a picture, MachineError without matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise RequestError("not a picture", path=path, expected=" or ".join(SUFFIXES))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        hint = 'pip install "moepack[plot]"'
        raise MachineError("plotting needs matplotlib", path=path, hint=hint) from None


def surface(points: Sequence[Mapping[str, Any]], title: str, path: str) -> None:
    """Draw the points of `bench` into the file at `path`, SVG or PNG by its name.

    Raises what `check` raises, and MachineError where the file cannot be written.
    """
    check(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    orders = list(dict.fromkeys(point["order"] for point in points))
    figure, axes = pyplot.subplots(
        1, len(orders), figsize=(5.5 * len(orders), 4.2), sharey=True, squeeze=False
    )
    for axis, order in zip(axes[0], orders, strict=True):
        _draw(axis, [point for point in points if point["order"] == order])
        axis.set_title(f"{order} reads")
    axes[0][0].set_ylabel("MiB/s")
    axes[0][-1].legend(title="in flight", fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    try:
        # Without a date the same numbers give the same file.
        metadata = {"Date": None} if path.lower().endswith(".svg") else None
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise MachineError(f"cannot write: {error.strerror}", path=path) from None
    finally:
        pyplot.close(figure)


def _draw(axis: Any, points: Sequence[Mapping[str, Any]]) -> None:
    lengths = sorted({point["length"] for point in points})
    for depth in sorted({point["depth"] for point in points}):
        line = sorted((p["length"], p["bytes_per_second"]) for p in points if p["depth"] == depth)
        axis.plot(
            [length for length, _ in line],
            [speed / (1 << 20) for _, speed in line],
            marker="o",
            label=str(depth),
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length >> 10} KiB" for length in lengths], rotation=45)
    axis.set_xlabel("read size")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
