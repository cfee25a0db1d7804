"""What was measured of a machine, as text for people."""

from collections.abc import Iterator

from moepack.bench.machine import MeasuredMachine
from moepack.machine.model import Drive, Figure
from moepack.machine.units import compute_text
from moepack.sizes import size_text

_GB, _MB = 10**9, 10**6


def text(measured: MeasuredMachine) -> str:
    """Write memory, GPUs and the drive."""
    machine = measured.machine
    lines = [f"memory  {size_text(int(machine.memory.value))}, {_speed(machine.memory_bandwidth)}"]
    if machine.compute is not None:
        lines.append(f"CPUs    {compute_text(machine.compute.value)} in products of matrices")
    for gpu in machine.gpus:
        length = size_text(int(gpu.memory.value))
        lines.append(f"GPU     {gpu.name or '–'}: {length}, {_speed(gpu.bandwidth)}")
    if machine.drive is None:
        return "\n".join([*lines, "drive   –"])
    return "\n".join([*lines, *_drive(machine.drive, measured.backend)])


def _drive(drive: Drive, backend: str | None) -> Iterator[str]:
    speeds = {(read.length, read.depth): read.bandwidth.value for read in drive.reads}
    depths = sorted({depth for _, depth in speeds})
    yield f"drive   {drive.path or '–'}, random reads with {backend}, MB/s by reads in flight"
    yield " " * 18 + "".join(f"{depth:>7}" for depth in depths)
    for length in sorted({length for length, _ in speeds}):
        row = (speeds.get((length, depth)) for depth in depths)
        cells = ("" if speed is None else f"{speed / _MB:,.0f}" for speed in row)
        yield f"{size_text(length):>18}" + "".join(f"{cell:>7}" for cell in cells)


def _speed(figure: Figure | None) -> str:
    """Write `18.8 GB/s (17.1 to 20.3)`."""
    if figure is None:
        return "– GB/s"
    ends = ""
    if figure.lowest is not None and figure.highest is not None:
        ends = f" ({figure.lowest / _GB:,.1f} to {figure.highest / _GB:,.1f})"
    return f"{figure.value / _GB:,.1f} GB/s{ends}"
