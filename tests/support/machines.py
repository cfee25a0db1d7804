"""Machines that tests forecast for."""

from pathlib import Path
from typing import Any

from moepack.planning.machine.file import toml_text
from moepack.planning.machine.model import Basis, Drive, Figure, Gpu, Machine, ReadSpeed

GB = 10**9


def machine(
    *,
    memory: float = 64,
    bandwidth: float | None = None,
    basis: Basis = "typed",
    vram: float | None = None,
    vram_bandwidth: float | None = None,
    drive: float | None = None,
    gpu_count: int = 1,
) -> Machine:
    """Return a machine, by lengths in GB and bandwidths in GB/s; `basis` is of its memory's."""
    gpus: tuple[Gpu, ...] = ()
    if vram is not None:
        figure = None if vram_bandwidth is None else Figure(vram_bandwidth * GB, "typed")
        gpus = (Gpu("GPU", Figure(vram * GB, "typed"), figure),) * gpu_count
    return Machine(
        "box",
        Figure(memory * GB, "typed"),
        None if bandwidth is None else Figure(bandwidth * GB, basis),
        gpus,
        None if drive is None else Drive(None, Figure(drive * GB, "typed")),
    )


def write_machine(path: Path, **figures: Any) -> Path:
    """Write a machine's file, by what `machine` takes."""
    path.write_text(toml_text(machine(**figures)))
    return path


def surface(speeds: dict[tuple[int, int], tuple[float, float]]) -> Drive:
    """Return a drive by length and depth of reads, with the lowest and highest GB/s of each."""
    return Drive(
        "/models",
        None,
        tuple(
            ReadSpeed(length, depth, Figure((low + high) / 2 * GB, "measured", low * GB, high * GB))
            for (length, depth), (low, high) in speeds.items()
        ),
    )
