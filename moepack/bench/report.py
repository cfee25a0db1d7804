"""What a benchmark found, in numbers: lengths in bytes, times in seconds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.bench.drive import Point
from moepack.bench.rounds import Measurement
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import Gain
from moepack.bench.ways import RawBuffers


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
    """What was read: the experts of so many routed layers, and where the choice came from.

    They are those of `token_count` tokens, and are read portion by portion, over and over.
    `useful_length` is the bytes of the experts' parts, without padding or rounding.
    """

    origin: str
    routed_layer_count: int
    portion_count: int
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

    `why` says why `backend` read; `cold_is_assured` is None where that is not known. Of
    `round_count` rounds in `seconds`, `disturbed_round_count` are left out of `gains`: other
    processes used the drive or the CPUs. `gains` are empty without a source to compare with.
    `outcome` and `needed_seconds` are the verdict's; `packing_gains` is whether there is a gain,
    None where that was not decided.
    """

    pack: str
    pack_length: int
    backend: str
    why: str
    surface: tuple[SurfacePoint, ...]
    routing: RoutedReads
    readings: tuple[MeasuredReads, ...]
    raw_buffers: RawBuffers
    cold_is_assured: bool | None
    round_count: int
    disturbed_round_count: int
    gains: tuple[Gain, ...]
    seconds: float
    outcome: str | None
    packing_gains: bool | None
    needed_seconds: float | None
    verdict: str
    notes: tuple[str, ...]


class Take(NamedTuple):
    """One reading, the useful bytes in it, and for how many tokens that was."""

    usage: Usage
    useful_length: int
    token_count: float


def surface_point(point: Point, usage: Usage) -> SurfacePoint:
    """Return a point of the surface in numbers that compare."""
    return SurfacePoint(
        *point,
        bytes_per_second=usage.length / usage.seconds,
        cpu_seconds_per_gib=_cpu_per_gib(usage, usage.length),
        read_count=usage.read_count,
    )


def measured_reads(measurement: Measurement, takes: Sequence[Take]) -> MeasuredReads:
    """Sum up the rounds of one measurement."""
    layout, condition = measurement
    speeds = [take.useful_length / take.usage.seconds for take in takes]
    tokens = sum(take.token_count for take in takes)
    return MeasuredReads(
        layout,
        *condition,
        bytes_per_second=statistics.median(speeds),
        bytes_per_second_lowest=min(speeds),
        bytes_per_second_highest=max(speeds),
        cpu_seconds_per_gib=statistics.median(
            _cpu_per_gib(take.usage, take.useful_length) for take in takes
        ),
        seconds_per_token=statistics.median(
            take.usage.seconds / take.token_count for take in takes
        ),
        reads_per_token=sum(take.usage.read_count for take in takes) / tokens,
        length_per_token=sum(take.usage.length for take in takes) / tokens,
    )


def _cpu_per_gib(usage: Usage, length: int) -> float:
    return usage.cpu_seconds / (length / (1 << 30))
