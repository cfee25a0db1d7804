"""Measurements of a machine, as text for people."""

from collections.abc import Iterable

from moepack.bench.machine import MeasuredMachine
from moepack.common.sizes import size_text
from moepack.planning.machine.model import Figure
from moepack.planning.machine.units import compute_text
from moepack.report.page import Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, speed_text


def text(measured: MeasuredMachine) -> Page:
    """Write memory, GPUs and the drive."""
    machine = measured.machine
    lines = [f"memory  {size_text(int(machine.memory.value))}, {_speed(machine.memory_bandwidth)}"]
    if machine.compute is not None:
        lines.append(f"CPUs    {compute_text(machine.compute.value)} in products of matrices")
    for gpu in machine.gpus:
        length = size_text(int(gpu.memory.value))
        lines.append(f"GPU     {gpu.name or UNKNOWN}: {length}, {_speed(gpu.bandwidth)}")
    drive = machine.drive
    if drive is None:
        return Page(*lines, f"drive   {UNKNOWN}")
    how = f"random reads with {measured.backend}, MiB/s by size and reads in flight"
    points = [(read.length, read.depth, read.bandwidth.value) for read in drive.reads]
    return Page(*lines, f"drive   {drive.path or UNKNOWN}, {how}", surface(points, indent=8))


def surface(points: Iterable[tuple[int, int, float]], indent: int) -> Table:
    """Return a table of MiB/s by length in bytes and depth; the deepest are left out first.

    A point is a length, a depth, and bytes a second.
    """
    speeds = {(length, depth): speed for length, depth, speed in points}
    depths = sorted({depth for _, depth in speeds})
    columns = [Column(""), *(Column(str(depth), rank=rank) for rank, depth in enumerate(depths))]
    rows = [
        [size_text(length), *(mib_text(speeds.get((length, depth))) for depth in depths)]
        for length in sorted({length for length, _ in speeds})
    ]
    return Table(columns, rows, indent)


def mib_text(speed: float | None) -> str:
    """Write bytes a second as MiB/s, without the unit; nothing if it was not measured."""
    return "" if speed is None else f"{speed / (1 << 20):,.0f}"


def _speed(figure: Figure | None) -> str:
    """Write `18.8 GiB/s (17.1 to 20.3 GiB/s)`."""
    if figure is None:
        return f"{UNKNOWN} GiB/s"
    ends = ""
    if figure.lowest is not None and figure.highest is not None:
        ends = f" ({speed_text(figure.lowest)} to {speed_text(figure.highest)})"
    return f"{speed_text(figure.value)}{ends}"
