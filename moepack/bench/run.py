"""The command `bench`: a drive measured, and a pack on it compared with the shards.

The same experts are read in the same order from the pack and from the shards, and the verdict says
whether that makes a difference.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moepack.bench import drive, layouts, workload
from moepack.bench.comparison import (
    USUAL_SECONDS,
    WARM_UP_SHARE,
    Comparison,
    RawBuffers,
    Rig,
    Schedule,
    compare,
)
from moepack.bench.disturbance import DisturbanceMonitor
from moepack.bench.drive import SurfacePoint
from moepack.bench.layouts import Groups
from moepack.bench.measuring import Meter
from moepack.bench.rounds import Measurement, readings_of, undisturbed
from moepack.bench.verdict import NO_PACK, Gain, cold_is_assured, judge, notes, verdict
from moepack.bench.workload import RoutedLayer, Workload
from moepack.common.errors import RequestError
from moepack.common.keys import ExpertKey
from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.phases import Progress
from moepack.common.sizes import Size, as_list, parse_size
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.storage import probe
from moepack.storage.backend import Backend
from moepack.traces.hotness import measure
from moepack.traces.hotness.stored import stored_counts

MAX_DEPTH = 256
MAX_TOKENS = 512
"""Tokens that are taken from a trace or drawn; for most drives `length` is less."""


@dataclass(frozen=True, slots=True)
class RoutedReads:
    """The experts that were read, portion by portion, over and over; `origin` says who chose them.

    `routed_layer_count` is the routed layers of all `token_count` tokens. `useful_length` is the
    bytes of the experts' parts, without padding or rounding.
    """

    origin: str
    routed_layer_count: int
    portion_count: int
    token_count: float
    useful_length: int


@dataclass(frozen=True, slots=True)
class MeasuredReads:
    """The rounds of one measurement, summed up; speeds count the useful bytes alone."""

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
    """All measurements and the verdict.

    `why` is the reason for the `backend`; `cold_is_assured` is None if unknown. Of `round_count`
    rounds in `seconds`, `disturbed_round_count` are left out of `gains`: other processes used the
    drive or the CPUs. `gains` are empty without a source to compare with. `outcome` and
    `needed_seconds` are the verdict's; `packing_gains` is whether there is a gain, None if that is
    undecided.
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


class Settings(NamedTuple):
    """The arguments of `bench_pack` that say how much is measured."""

    depths: tuple[int, ...] = (1, 4, 16)
    seconds: float | None = None
    length: int = 256 << 20
    point_seconds: float = 0.25

    def check(self) -> None:
        """Raise RequestError for a setting out of bounds."""
        if not self.depths or not all(1 <= depth <= MAX_DEPTH for depth in self.depths):
            raise RequestError(
                "not a list of depths",
                expected=f"numbers from 1 to {MAX_DEPTH}",
                found=",".join(map(str, self.depths)),
            )
        for name, value, lowest in (
            ("time in seconds", self.seconds or 0.0, 0),
            ("length in bytes", self.length, 1),
            ("time for a point in seconds", self.point_seconds, 0),
        ):
            if not lowest <= value < math.inf:
                raise RequestError(f"not a {name}", expected=f">= {lowest}", found=value)


def bench_pack(
    path: AnyPath,
    *,
    source: PathOrPaths | None = None,
    trace: AnyPath | None = None,
    hotness: AnyPath | None = None,
    experts_used: int | None = None,
    backend: str = "auto",
    depths: int | Sequence[int] = (1, 4, 16),
    seconds: float | None = None,
    length: Size = 256 << 20,
    point_seconds: float = 0.25,
    progress: Progress | None = None,
    announce: Callable[[Schedule], None] | None = None,
) -> BenchReport:
    """Measure the drive of the pack at `path`, and the gain of the pack there.

    Of a GGUF at `path` the reads from the shards are measured, and nothing is compared. `source` is
    the model that the pack was made from, to compare with. The experts that are read are those of a
    `trace`; else `experts_used` per layer (by default as many as the model uses) are drawn by a
    file of `hotness`, by the pack's own, or uniformly. `depths` are reads in flight, `length` the
    bytes of blobs to read repeatedly, fewer on a slow drive. `point_seconds` is the time for each
    point of the surface, 0 for no surface, `seconds` the time for the comparison: by default 45, or
    up to 600 if a slow drive takes that long for a verdict. `announce` gets the schedule of the
    comparison before it begins. Raises RequestError for bad arguments, and what opening and reading
    raise.
    """
    trace, hotness = (None if path is None else os.fspath(path) for path in (trace, hotness))
    sorted_depths = tuple(sorted(set(as_list(depths))))
    settings = Settings(sorted_depths, seconds, parse_size(length, "length"), point_seconds)
    settings.check()
    if trace is not None and hotness is not None:
        raise RequestError("a trace and hotness at once: give one of them")
    if source is not None and named_pack(path) is None:
        hint = "a source needs a pack of it: `moepack pack` makes one"
        raise RequestError("not a pack, and nothing to compare", path=path, hint=hint)
    with open_model(path) as pack:
        pack.require_files()
        model = None if source is None else open_source(source)
        reads = _local(pack, _choose_workload(pack, model, trace, hotness, experts_used))
        chosen, why = probe.choose(backend, pack.file_paths, max(settings.depths))
        chosen.close()

        def make(depth: int) -> Backend:
            return probe.choose(chosen.name, pack.file_paths, depth)[0]

        shards = () if model is None else [Path(shard.path) for shard in model.shards]
        monitor = DisturbanceMonitor((*pack.file_paths, *shards))
        rig = Rig(make, time.perf_counter, monitor)
        return measure_pack(pack, model, reads, rig, settings, why, progress, announce)


def _local(pack: Pack, reads: Workload) -> Workload:
    """Return a workload without the experts that are not in a part of a pack.

    Raises RequestError if none are left.
    """
    if pack.partial is None:
        return reads
    layers = [
        one._replace(experts=tuple(n for n in one.experts if pack.is_local(one.layer, n)))
        for one in reads.layers
    ]
    layers = [one for one in layers if one.experts]
    if not layers:
        pack.require_complete()
    return reads._replace(layers=layers, origin=f"{reads.origin}, of those that are here")


def _choose_workload(
    pack: Pack,
    model: Source | None,
    trace: str | None,
    hotness: str | None,
    experts_used: int | None,
) -> Workload:
    """Take the experts from a trace, or draw them by the best counts there are."""
    shape = pack.shape
    if not shape.routed:
        raise RequestError("the pack has no routed experts", path=pack.path)
    if trace is not None:
        return workload.from_trace(trace, shape, MAX_TOKENS)
    of_model = shape.experts_used or (model and shape_of(model, find_experts(model)).experts_used)
    used = experts_used or of_model or workload.USUAL_EXPERTS_USED
    counts: Mapping[ExpertKey, int]
    if hotness is not None:
        counts = measure.load(hotness, shape).counts
        origin = f"drawn by {hotness}"
    else:
        counts = stored_counts(pack)
        origin = (
            "drawn by the pack's hotness" if counts else "drawn uniformly: the hotness is unknown"
        )
    origin = f"{origin}, {used} experts a layer"
    return workload.from_counts(counts, shape, used, MAX_TOKENS, origin)


def measure_pack(
    pack: Pack,
    model: Source | None,
    reads: Workload,
    rig: Rig,
    settings: Settings,
    why: str = "",
    progress: Progress | None = None,
    announce: Callable[[Schedule], None] | None = None,
) -> BenchReport:
    """Measure the drive's surface and the routed reads with a `rig`, and judge them."""
    groups = _layouts(pack, model, fit(pack, reads.layers, settings.length))
    files = [(path, path.stat().st_size) for path in pack.file_paths]
    if pack.partial is not None:  # reads of holes would be of no drive
        files = [(path, size) for path, size in files if pack.partial.has_all_of(path.name, size)]
    grid = drive.grid(files) if files and settings.point_seconds else []
    seconds = USUAL_SECONDS if settings.seconds is None else settings.seconds
    planned_seconds = len(grid) * settings.point_seconds + (1 + WARM_UP_SHARE) * seconds
    meter = Meter(planned_seconds, rig.clock, progress)
    with closing(rig.make_backend(max(settings.depths))) as backend:
        surface = drive.measure(
            backend, files, grid, settings.point_seconds, meter.advance, rig.clock
        )
    compared = compare(pack, groups, rig, settings.depths, settings.seconds, meter, announce)
    meter.finish()
    rounds, was_cold, schedule = compared.rounds, compared.was_cold, compared.schedule
    gains = () if model is None else judge(rounds, compared.conditions)
    judgement = verdict(
        gains, rounds, backend.name, was_cold, schedule.seconds, schedule.needed_seconds
    )
    pack_length = sum(length for _, length in files)
    layer_tokens = reads.token_count / len(reads.layers)
    return BenchReport(
        pack=str(pack.path),
        pack_length=pack_length,
        backend=backend.name,
        why=why,
        surface=surface,
        routing=_routed_reads(compared, reads.origin, layer_tokens),
        readings=_readings(compared, layer_tokens),
        raw_buffers=compared.buffers,
        cold_is_assured=cold_is_assured(was_cold, pack_length),
        round_count=len(rounds),
        disturbed_round_count=len(rounds) - len(undisturbed(rounds)),
        gains=gains,
        seconds=schedule.seconds,
        outcome=judgement.outcome,
        packing_gains=judgement.packing_gains,
        needed_seconds=judgement.needed_seconds,
        verdict=NO_PACK if model is None and _is_apart(pack) else judgement.text,
        notes=(*notes(rounds, backend.name, was_cold, pack_length), *_codec_notes(pack)),
    )


def _codec_notes(pack: Pack) -> tuple[str, ...]:
    """Return a note that ways differ if parts are stored by a codec."""
    if not pack.index.codecs:
        return ()
    names = ", ".join(pack.index.codecs)
    return (
        f"parts are stored by {names}: `reader` decodes them, raw and mapped reads of the pack"
        " do not; speeds are of the bytes that were packed",
    )


def fit(pack: Pack, layers: Sequence[RoutedLayer], length: int) -> list[RoutedLayer]:
    """Return the first routed layers whose blobs have `length` bytes, or all; at least one."""
    fitting: list[RoutedLayer] = []
    for routed in layers:
        if fitting and length <= 0:
            break
        length -= sum(pack.hotness(routed.layer, expert).length for expert in routed.experts)
        fitting.append(routed)
    return fitting


def _is_apart(pack: Pack) -> bool:
    """Return whether the parts of an expert lie apart, as in shards."""
    return any(file.is_shard for file in pack.index.files)


def _layouts(pack: Pack, model: Source | None, layers: Sequence[RoutedLayer]) -> dict[str, Groups]:
    """Return the layouts to compare."""
    groups = {"blobs": layouts.blobs(pack, layers)}
    if not _is_apart(pack):  # else a part is read by itself in any case
        groups["parts"] = layouts.parts(pack, layers)
    if model is not None:
        groups["slices"] = layouts.slices(model, pack, layers)
    return groups


def _routed_reads(compared: Comparison, origin: str, layer_tokens: float) -> RoutedReads:
    """Sum up the reads. `layer_tokens` is tokens by routed layers."""
    blobs = compared.portions["blobs"]
    layer_count = sum(len(portion.groups) for portion in blobs)
    useful_length = sum(portion.useful_length for portion in blobs)
    return RoutedReads(origin, layer_count, len(blobs), layer_count * layer_tokens, useful_length)


def _readings(compared: Comparison, layer_tokens: float) -> tuple[MeasuredReads, ...]:
    """Sum up each measurement, over the undisturbed rounds, or over all if these lack it."""
    return tuple(
        _measured_reads(Measurement(layout, condition), compared, layer_tokens)
        for condition in compared.conditions
        for layout in compared.portions
    )


def _measured_reads(
    measurement: Measurement, compared: Comparison, layer_tokens: float
) -> MeasuredReads:
    portions = compared.portions[measurement.layout]
    readings = readings_of(undisturbed(compared.rounds), measurement)
    readings = readings or readings_of(compared.rounds, measurement)
    usages = [usage for _, usage in readings]
    lengths = [portions[number].useful_length for number, _ in readings]
    tokens = [len(portions[number].groups) * layer_tokens for number, _ in readings]
    speeds = [length / usage.seconds for usage, length in zip(usages, lengths, strict=True)]
    return MeasuredReads(
        measurement.layout,
        *measurement.condition,
        bytes_per_second=statistics.median(speeds),
        bytes_per_second_lowest=min(speeds),
        bytes_per_second_highest=max(speeds),
        cpu_seconds_per_gib=statistics.median(
            usage.cpu_seconds_per_gib(length) for usage, length in zip(usages, lengths, strict=True)
        ),
        seconds_per_token=statistics.median(
            usage.seconds / count for usage, count in zip(usages, tokens, strict=True)
        ),
        reads_per_token=sum(usage.read_count for usage in usages) / sum(tokens),
        length_per_token=sum(usage.length for usage in usages) / sum(tokens),
    )
