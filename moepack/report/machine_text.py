"""What was measured of a machine, as text for people."""

from collections.abc import Iterator

from moepack.bench.machine import MeasuredMachine
from moepack.machine.model import Drive, Figure
from moepack.machine.units import compute_text
from moepack.report.page import Block, Page
from moepack.report.surface import surface
from moepack.report.values import UNKNOWN, speed_text
from moepack.sizes import size_text


def text(measured: MeasuredMachine) -> Page:
    """Write memory, GPUs and the drive."""
    machine = measured.machine
    lines = [f"memory  {size_text(int(machine.memory.value))}, {_speed(machine.memory_bandwidth)}"]
    if machine.compute is not None:
        lines.append(f"CPUs    {compute_text(machine.compute.value)} in products of matrices")
    for gpu in machine.gpus:
        length = size_text(int(gpu.memory.value))
        lines.append(f"GPU     {gpu.name or UNKNOWN}: {length}, {_speed(gpu.bandwidth)}")
    if machine.drive is None:
        return Page(*lines, f"drive   {UNKNOWN}")
    return Page(*lines, *_drive(machine.drive, measured.backend))


def _drive(drive: Drive, backend: str | None) -> Iterator[Block]:
    path = drive.path or UNKNOWN
    yield f"drive   {path}, random reads with {backend}, MiB/s by size and reads in flight"
    points = [(read.length, read.depth, read.bandwidth.value) for read in drive.reads]
    yield surface(points, indent=8)


def _speed(figure: Figure | None) -> str:
    """Write `18.8 GiB/s (17.1 to 20.3 GiB/s)`."""
    if figure is None:
        return f"{UNKNOWN} GiB/s"
    ends = ""
    if figure.lowest is not None and figure.highest is not None:
        ends = f" ({speed_text(figure.lowest)} to {speed_text(figure.highest)})"
    return f"{speed_text(figure.value)}{ends}"
