"""A machine, as forecasts and placements know it: figures, and the basis of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

_TYPED_WAIT = 200e-6
"""Seconds beside the bytes of a step that reads of a drive with a typed bandwidth."""

STEADY = 1.5
"""The ratio of the fastest reading to the slowest that is still worth no word."""

Basis = Literal["measured", "read", "typed"]
"""The origin of a figure: a measurement, the kernel or a driver, or a person.

People type figures of data sheets, most likely; a bandwidth that is read is calculated from clocks
and widths, so it is the same. Neither is ever reached.
"""


class Figure(NamedTuple):
    """A figure of a machine: bytes, bytes a second, or floating-point operations a second.

    `lowest` and `highest` are the least and the most that was measured, None if nothing was.
    """

    value: float
    basis: Basis
    lowest: float | None = None
    highest: float | None = None

    @property
    def spread(self) -> float | None:
        """The ratio of the highest to the lowest; None if that is not known."""
        return self.highest / self.lowest if self.lowest and self.highest is not None else None


def measured(values: Sequence[float]) -> Figure:
    """Return the figure of several measurements: their median, which lasts, and their ends.

    With four digits: no two measurements agree on more.
    """
    figures = statistics.median(values), min(values), max(values)
    middle, *ends = (float(f"{value:.4g}") for value in figures)
    return Figure(middle, "measured", *ends)


class Gpu(NamedTuple):
    """A GPU: its memory in bytes, and the bandwidth of that; None is unknown.

    `link` is the bytes a second from main memory, `compute` the operations a second of its matrix
    products. With `is_unified` it has no memory of its own: `memory` is how much of the machine's
    it may use.
    """

    name: str | None
    memory: Figure
    bandwidth: Figure | None
    link: Figure | None = None
    compute: Figure | None = None
    is_unified: bool = False


class ReadSpeed(NamedTuple):
    """The bytes a second of random reads of `length` bytes, `depth` in flight."""

    length: int
    depth: int
    bandwidth: Figure


class DriveSpeed(NamedTuple):
    """The time of a step that misses experts: `wait` seconds, and their bytes by `bandwidth`."""

    wait: float
    bandwidth: Figure


class Drive(NamedTuple):
    """A drive, or several that are read as one.

    `bandwidth` is for reads of any length, if only one figure is known; `reads` are measured, in
    the folder `path`. One of both is known at least. `sequential` is for reads one after another
    in a file.
    """

    path: str | None
    bandwidth: Figure | None
    reads: tuple[ReadSpeed, ...] = ()
    sequential: Figure | None = None

    @property
    def unsteady(self) -> list[float]:
        """The spreads of reads that were not steady: the drive is shared, or throttled."""
        spreads = (read.bandwidth.spread or 1.0 for read in self.reads)
        return [spread for spread in spreads if spread > STEADY]

    def speed(self, length: int, depth: int) -> Figure:
        """Return the bytes a second of reads of `length` bytes, `depth` in flight.

        Between two measured lengths, and two depths, by the logarithm; beyond them, as the nearest.
        """
        return _interpolated(depth, self._by_depth(length).items())

    def step(self, length: int) -> DriveSpeed:
        """Return how long steps take that miss experts of `length` bytes, which are read at once.

        The line nearest to what was measured, by the relative error.
        """
        if not self.reads:
            assert self.bandwidth is not None, "a drive without figures"
            return DriveSpeed(_TYPED_WAIT, self.bandwidth)
        by_depth = self._by_depth(length)
        lengths = {depth: depth * length for depth in by_depth}
        seconds = {depth: lengths[depth] / one.value for depth, one in by_depth.items()}
        wait, each = _line([(lengths[depth], seconds[depth]) for depth in by_depth])
        deepest = by_depth[max(by_depth)]
        return DriveSpeed(wait, deepest._replace(value=1 / each))

    def _by_depth(self, length: int) -> dict[int, Figure]:
        return {
            one: _interpolated(
                length, [(read.length, read.bandwidth) for read in self.reads if read.depth == one]
            )
            for one in {read.depth for read in self.reads}
        }


class Machine(NamedTuple):
    """A computer.

    All programs together may take the bytes of `memory`: the system's, or the limit of a control
    group. `memory_bandwidth` is the bytes a second that all CPUs together read of it, `compute`
    the operations a second of their matrix products. A unified GPU has no others beside it.
    """

    name: str | None
    memory: Figure
    memory_bandwidth: Figure | None
    gpus: tuple[Gpu, ...] = ()
    drive: Drive | None = None
    compute: Figure | None = None

    @property
    def is_unified(self) -> bool:
        """Whether memory and VRAM are the same."""
        return any(gpu.is_unified for gpu in self.gpus)

    @property
    def vram_bandwidth(self) -> Figure | None:
        """The bandwidth of the slowest GPU: layers are computed one after the other.

        None without a GPU, and if that of any GPU is not known; so is the next.
        """
        return _extreme(min, (gpu.bandwidth for gpu in self.gpus))

    @property
    def highest_vram_bandwidth(self) -> Figure | None:
        """The bandwidth of the fastest GPU: all bytes that are read of VRAM may lie there."""
        return _extreme(max, (gpu.bandwidth for gpu in self.gpus))

    @property
    def link(self) -> Figure | None:
        """The slowest link from memory to a GPU; None if any is not known.

        In unified memory bytes are copied as fast as the GPU reads them.
        """
        return _extreme(min, (gpu.bandwidth if gpu.is_unified else gpu.link for gpu in self.gpus))


def _extreme(
    choose: Callable[..., Figure | None], figures: Iterable[Figure | None]
) -> Figure | None:
    """Return the least or the greatest figure; None without any, or if one is not known."""
    listed = list(figures)
    return None if None in listed else choose(listed, key=lambda one: one.value, default=None)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the start and the slope of a line, neither below 0, near `points` (x, y above 0)."""
    ones = sum(1 / y**2 for _, y in points)
    xs, squares = (sum(x**power / y**2 for x, y in points) for power in (1, 2))
    ys, products = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    through_zero = products / squares
    spread = ones * squares - xs**2
    if len(points) < 2 or spread <= 0:
        return 0.0, through_zero
    start, slope = (ys * squares - xs * products) / spread, (ones * products - xs * ys) / spread
    return (start, slope) if start > 0 and slope > 0 else (0.0, through_zero)


def _interpolated(position: float, points: Iterable[tuple[float, Figure]]) -> Figure:
    """Interpolate figures by the logarithm of their positions."""

    def between(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one + share * (other - one)

    ascending = sorted(points, key=lambda point: point[0])
    if position <= ascending[0][0]:
        return ascending[0][1]
    for (start, low), (end, high) in pairwise(ascending):
        if position <= end:
            share = math.log(position / start) / math.log(end / start)
            value = low.value + share * (high.value - low.value)
            ends = between(low.lowest, high.lowest), between(low.highest, high.highest)
            return Figure(value, low.basis, *ends)
    return ascending[-1][1]
