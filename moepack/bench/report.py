"""What a benchmark found, in numbers: lengths in bytes, times in seconds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moepack.bench.drive import Point
from moepack.bench.replay import Measurement
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import Gain


@dataclass(frozen=True, slots=True)
class SurfacePoint:
    """How fast the drive reads `length` bytes at a time, `depth` reads in flight, in `order`."""

    length: int
    depth: int
    order: str
    bytes_per_second: float
    cpu_seconds_per_gib: float
    read_count: int


@dataclass(frozen=True, slots=True)
class RoutedReads:
    """What was read: `step_count` layers of `token_count` tokens, and where they came from.

    `useful_length` is the bytes of the experts' parts, without padding or rounding.
    """

    origin: str
    step_count: int
    token_count: float
    useful_length: int


@dataclass(frozen=True, slots=True)
class MeasuredReads:
    """What the rounds of one measurement took; speeds count the useful bytes alone."""

    layout: str
    way: str
    state: str
    depth: int
    bytes_per_second: float
    bytes_per_second_lowest: float
    bytes_per_second_highest: float
    cpu_seconds_per_gib: float
    seconds_per_token: float
    reads_per_token: float
    length_per_token: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that was measured, and what it means.

    `why` says why `backend` read; `cold_is_assured` is None where the system does not tell what is
    cached; `gains` are empty without a source to compare with.
    """

    pack: str
    pack_length: int
    backend: str
    why: str
    surface: tuple[SurfacePoint, ...]
    routing: RoutedReads
    readings: tuple[MeasuredReads, ...]
    cold_is_assured: bool | None
    gains: tuple[Gain, ...]
    verdict: str
    notes: tuple[str, ...]


def surface_point(point: Point, usage: Usage) -> SurfacePoint:
    """Return a point of the surface in numbers that compare."""
    return SurfacePoint(
        *point,
        bytes_per_second=usage.length / usage.seconds,
        cpu_seconds_per_gib=_cpu_per_gib(usage, usage.length),
        read_count=usage.read_count,
    )


def measured_reads(
    measurement: Measurement, usages: Sequence[Usage], useful_length: int, token_count: float
) -> MeasuredReads:
    """Sum up the rounds of one measurement."""
    speeds = [useful_length / usage.seconds for usage in usages]
    return MeasuredReads(
        *measurement,
        bytes_per_second=statistics.median(speeds),
        bytes_per_second_lowest=min(speeds),
        bytes_per_second_highest=max(speeds),
        cpu_seconds_per_gib=statistics.median(
            _cpu_per_gib(usage, useful_length) for usage in usages
        ),
        seconds_per_token=statistics.median(usage.seconds for usage in usages) / token_count,
        reads_per_token=usages[0].read_count / token_count,
        length_per_token=usages[0].length / token_count,
    )


def _cpu_per_gib(usage: Usage, length: int) -> float:
    return usage.cpu_seconds / (length / (1 << 30))
