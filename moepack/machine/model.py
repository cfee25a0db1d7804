"""A machine, as forecasts and placements know it: figures, and where each of them comes from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

STEADY = 1.5
"""Times the slowest reading that the fastest may be before it is worth a word."""

Basis = Literal["measured", "read", "typed"]
"""Where a figure comes from: a measurement, what the kernel or a driver says, or a person.

Who types one has it from a data sheet, most likely; a bandwidth that is read is calculated from
clocks and widths, so it is the same. Neither is ever reached.
"""


class Figure(NamedTuple):
    """A figure of a machine: bytes, bytes a second, or floating-point operations a second.

    `lowest` and `highest` are the least and the most of what was measured, None where it was not.
    """

    value: float
    basis: Basis
    lowest: float | None = None
    highest: float | None = None

    @property
    def spread(self) -> float | None:
        """How many times the lowest the highest is; None where that is not known."""
        if not self.lowest or self.highest is None:
            return None
        return self.highest / self.lowest


BYTE_UNITS = tuple(1024.0**n for n in range(5))
"""What bytes are counted in: B, KiB, MiB and so on."""


def measured(values: Sequence[float], units: Sequence[float] = (1.0,)) -> Figure:
    """Return what several measurements say: their median, which is what lasts, and their ends.

    With four digits, in the largest of `units` that it has: no two measurements agree on more.
    """
    middle, lowest, highest = (
        _rounded(value, units) for value in (statistics.median(values), min(values), max(values))
    )
    return Figure(middle, "measured", lowest, highest)


def _rounded(value: float, units: Sequence[float]) -> float:
    unit = max((unit for unit in units if unit <= value), default=1.0)
    return float(f"{value / unit:.4g}") * unit


class Gpu(NamedTuple):
    """A GPU: its memory in bytes, and the bytes a second it reads of it.

    `link` is the bytes a second that come to it from main memory, `compute` the operations a second
    of its matrix products. None is what is not known.
    """

    name: str | None
    memory: Figure
    bandwidth: Figure | None
    link: Figure | None = None
    compute: Figure | None = None


class ReadSpeed(NamedTuple):
    """The bytes a second of random reads of `length` bytes, `depth` of them in flight."""

    length: int
    depth: int
    bandwidth: Figure


class Drive(NamedTuple):
    """A drive, or several that are read as one.

    `bandwidth` is for reads of any length, where only one figure is known; `reads` are measured.
    `path` is where it was measured. One of both is known at least. `sequential` is for reads that
    come one after another in a file.
    """

    path: str | None
    bandwidth: Figure | None
    reads: tuple[ReadSpeed, ...] = ()
    sequential: Figure | None = None

    @property
    def unsteady(self) -> list[float]:
        """The spreads of those reads that were not steady: the drive is shared, or throttled."""
        spreads = [read.bandwidth.spread or 1.0 for read in self.reads]
        return [spread for spread in spreads if spread > STEADY]

    def speed(self, length: int, depth: int) -> Figure:
        """Return the bytes a second of reads of `length` bytes, `depth` of them in flight.

        Between two measured lengths, and two depths, by the logarithm; beyond them, as the nearest.
        """
        if not self.reads:
            assert self.bandwidth is not None, "a drive of which nothing is known"
            return self.bandwidth
        by_depth = {
            known: _between(
                length,
                [(read.length, read.bandwidth) for read in self.reads if read.depth == known],
            )
            for known in {read.depth for read in self.reads}
        }
        return _between(depth, sorted(by_depth.items()))


class Machine(NamedTuple):
    """A computer.

    `memory` is what all programs together may take, in bytes: the system's, or the limit of a
    control group. `memory_bandwidth` is what all CPUs together read of it, in bytes a second;
    `compute` is the operations a second of their matrix products.
    """

    name: str | None
    memory: Figure
    memory_bandwidth: Figure | None
    gpus: tuple[Gpu, ...] = ()
    drive: Drive | None = None
    compute: Figure | None = None

    @property
    def vram_bandwidth(self) -> Figure | None:
        """What the slowest GPU reads: layers are computed one after the other.

        None where there is no GPU, or one of which it is not known.
        """
        return min(self._vram_bandwidths(), key=lambda figure: figure.value, default=None)

    @property
    def highest_vram_bandwidth(self) -> Figure | None:
        """What the fastest GPU reads: all that is read of VRAM may lie there. None as above."""
        return max(self._vram_bandwidths(), key=lambda figure: figure.value, default=None)

    @property
    def link(self) -> Figure | None:
        """The slowest way from memory to a GPU; None where one of them is not known."""
        known = [gpu.link for gpu in self.gpus if gpu.link is not None]
        if len(known) < len(self.gpus):
            return None
        return min(known, key=lambda figure: figure.value, default=None)

    def _vram_bandwidths(self) -> list[Figure]:
        known = [gpu.bandwidth for gpu in self.gpus if gpu.bandwidth is not None]
        return known if len(known) == len(self.gpus) else []


def _between(place: float, points: Sequence[tuple[float, Figure]]) -> Figure:
    """Interpolate figures, which are given by ascending places, at the logarithm of `place`."""
    points = sorted(points, key=lambda point: point[0])
    if place <= points[0][0]:
        return points[0][1]
    for (start, low), (end, high) in pairwise(points):
        if place <= end:
            share = math.log(place / start) / math.log(end / start)
            return _mixed(low, high, share)
    return points[-1][1]


def _mixed(low: Figure, high: Figure, share: float) -> Figure:
    def mixed(first: float | None, second: float | None) -> float | None:
        if first is None or second is None:
            return None
        return first + share * (second - first)

    value = low.value + share * (high.value - low.value)
    return Figure(
        value, low.basis, mixed(low.lowest, high.lowest), mixed(low.highest, high.highest)
    )
