"""What a drive can do, and what a pack is worth on it: measured, judged, and told in numbers.

Nothing is known beforehand: the same experts are read in the same order from the pack and from the
shards, and where that makes no difference the verdict says so.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from moepack.bench import drive, replay, workload
from moepack.bench.comparison import Apparatus, Comparison, compare, real_apparatus
from moepack.bench.meter import Meter
from moepack.bench.pace import MEETING_SHARE, USUAL_SECONDS, Schedule
from moepack.bench.replay import Groups
from moepack.bench.report import (
    BenchReport,
    MeasuredReads,
    RoutedReads,
    Take,
    measured_reads,
    surface_point,
)
from moepack.bench.rounds import Measurement, quiet, readings_of
from moepack.bench.verdict import NO_PACK, cold_is_assured, judge, notes, verdict
from moepack.bench.workload import RoutedLayer, Workload
from moepack.errors import RequestError
from moepack.hotness import measure
from moepack.hotness.stored import stored_counts
from moepack.keys import ExpertKey
from moepack.packing.opening import open_model
from moepack.paths import AnyPath, PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.pack import Pack
from moepack.sizes import Size, as_list, parse_size
from moepack.source.experts import Experts, find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.storage import probe
from moepack.storage.backend import Backend

MAX_DEPTH = 256
MAX_TOKENS = 512
"""Tokens that are taken from a trace or drawn; most drives are done with `length` bytes before."""

Announce = Callable[[Schedule], None]
"""Is told before the comparison begins what is going to be done."""

Progress = Callable[[int, int], None]
"""Is called after each measurement, with the milliseconds since the last call and those in all."""


class Settings(NamedTuple):
    """How much is measured: see `bench_pack`."""

    depths: tuple[int, ...] = (1, 4, 16)
    seconds: float | None = None
    length: int = 256 << 20
    point_seconds: float = 0.25

    def check(self) -> None:
        """Raise RequestError for what cannot be measured."""
        if not self.depths or not all(1 <= depth <= MAX_DEPTH for depth in self.depths):
            raise RequestError(
                "not a list of depths",
                expected=f"numbers from 1 to {MAX_DEPTH}",
                found=",".join(map(str, self.depths)),
            )
        for what, value, lowest in (
            ("time in seconds", self.seconds or 0.0, 0),
            ("length in bytes", self.length, 1),
            ("time for a point in seconds", self.point_seconds, 0),
        ):
            if not lowest <= value < math.inf:
                raise RequestError(f"not a {what}", expected=f">= {lowest}", found=value)


class Model(NamedTuple):
    """The source that a pack was made from, and its experts."""

    source: Source
    experts: Experts


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
    announce: Announce | None = None,
) -> BenchReport:
    """Measure the drive that the pack at `path` lies on, and what the pack is worth there.

    Of a GGUF at `path` the reads that run from it takes are measured, and nothing is compared.
    `source` is what the pack was made from, to compare with. The experts that are read are those of
    a `trace`; else `experts_used` a layer (by default as many as the model uses) are drawn by a
    file of `hotness`, by the pack's own, or evenly. `depths` are reads in flight, `length` the
    bytes of blobs that are read over and over, or fewer where there is no time for them.
    `point_seconds` is the time for each point of the surface, 0 for no surface, `seconds` that for
    the comparison: by default 45, or up to 600 where a verdict takes longer on a slow drive.
    `announce` is told how long before it begins. Raises RequestError for what cannot be, and what
    opening and reading raise.
    """
    trace, hotness = (None if path is None else os.fspath(path) for path in (trace, hotness))
    known_depths = tuple(sorted(set(as_list(depths))))
    settings = Settings(known_depths, seconds, parse_size(length, "length"), point_seconds)
    settings.check()
    if trace is not None and hotness is not None:
        raise RequestError("a trace and hotness at once: give one of them")
    if source is not None and named_pack(path) is None:
        hint = "a source goes with a pack of it: `moepack pack` makes one"
        raise RequestError("not a pack, and nothing to compare", path=path, hint=hint)
    with open_model(path) as pack:
        model = None if source is None else _open_model(source)
        reads = _choose_workload(pack, model, trace, hotness, experts_used)
        chosen, why = probe.choose(backend, pack.file_paths, max(settings.depths))
        chosen.close()

        def make(depth: int) -> Backend:
            return probe.choose(chosen.name, pack.file_paths, depth)[0]

        shards = () if model is None else [Path(shard.path) for shard in model.source.shards]
        apparatus = real_apparatus(make, (*pack.file_paths, *shards))
        return measure_pack(pack, model, reads, apparatus, settings, why, progress, announce)


def _open_model(paths: PathOrPaths) -> Model:
    source = open_source(paths)
    return Model(source, find_experts(source))


def _choose_workload(
    pack: Pack,
    model: Model | None,
    trace: str | None,
    hotness: str | None,
    experts_used: int | None,
) -> Workload:
    """Take the experts from a trace, or draw them by the best counts there are."""
    shape = pack.shape
    if not shape.routed:
        raise RequestError("the pack has no experts that a router chooses", path=pack.path)
    if trace is not None:
        return workload.from_trace(trace, shape, MAX_TOKENS)
    stated = pack.shape.experts_used or (model and shape_of(*model).experts_used)
    used = experts_used or stated or workload.USUAL_EXPERTS_USED
    counts: Mapping[ExpertKey, int]
    if hotness is not None:
        counts = measure.load(hotness, shape).counts
        origin = f"drawn by {hotness}"
    else:
        counts = stored_counts(pack)
        origin = "drawn by the pack's hotness" if counts else "drawn evenly: no hotness is known"
    origin = f"{origin}, {used} experts a layer"
    return workload.from_counts(counts, shape, used, MAX_TOKENS, origin)


def measure_pack(
    pack: Pack,
    model: Model | None,
    reads: Workload,
    apparatus: Apparatus,
    settings: Settings,
    why: str = "",
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> BenchReport:
    """Measure the drive's surface and the routed reads; return all that was found."""
    layouts = _layouts(pack, model, fit(pack, reads.layers, settings.length))
    files = [(path, path.stat().st_size) for path in pack.file_paths]
    grid = drive.grid(files) if settings.point_seconds else []
    surface_seconds = len(grid) * settings.point_seconds
    meter = Meter(
        surface_seconds
        + (1 + MEETING_SHARE) * (USUAL_SECONDS if settings.seconds is None else settings.seconds),
        apparatus.clock,
        progress,
    )
    with closing(apparatus.make_backend(max(settings.depths))) as backend:
        surface = drive.measure(
            backend, files, grid, settings.point_seconds, meter.advance, apparatus.clock
        )
    found = compare(pack, layouts, apparatus, settings.depths, settings.seconds, meter, announce)
    meter.finish()
    gains = () if model is None else judge(found.rounds, found.conditions)
    said = verdict(gains, found.rounds, backend.name, found.was_cold, found.schedule)
    pack_length = sum(length for _, length in files)
    tokens_a_layer = reads.token_count / len(reads.layers)
    blobs = found.portions["blobs"]
    layer_count = sum(len(portion.groups) for portion in blobs)
    useful = sum(portion.useful_length for portion in blobs)
    return BenchReport(
        pack=str(pack.path),
        pack_length=pack_length,
        backend=backend.name,
        why=why,
        surface=tuple(surface_point(point, usage) for point, usage in surface.items()),
        routing=RoutedReads(
            reads.origin, layer_count, len(blobs), layer_count * tokens_a_layer, useful
        ),
        readings=_readings(found, tokens_a_layer),
        raw_buffers=found.buffers,
        cold_is_assured=cold_is_assured(found.was_cold, pack_length),
        round_count=len(found.rounds),
        disturbed_round_count=len(found.rounds) - len(quiet(found.rounds)),
        gains=gains,
        seconds=found.schedule.seconds,
        outcome=said.outcome,
        packing_gains=said.packing_gains,
        needed_seconds=said.needed_seconds,
        verdict=NO_PACK if model is None and _is_apart(pack) else said.text,
        notes=(
            *notes(found.rounds, backend.name, found.was_cold, pack_length),
            *_codec_notes(pack),
        ),
    )


def _codec_notes(pack: Pack) -> tuple[str, ...]:
    """Return a note on what is not alike if parts are stored by a codec."""
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
        length -= _length(pack, routed)
        fitting.append(routed)
    return fitting


def _length(pack: Pack, routed: RoutedLayer) -> int:
    return sum(pack.hotness(routed.layer, expert).length for expert in routed.experts)


def _is_apart(pack: Pack) -> bool:
    """Return whether the parts of an expert lie apart, as in shards."""
    return any(file.is_shard for file in pack.index.files)


def _layouts(pack: Pack, model: Model | None, layers: Sequence[RoutedLayer]) -> dict[str, Groups]:
    """List what is compared."""
    layouts = {"blobs": replay.blobs(pack, layers)}
    if not _is_apart(pack):  # else a part is read by itself in any case
        layouts["parts"] = replay.parts(pack, layers)
    if model is not None:
        layouts["slices"] = replay.slices(model.source, model.experts, pack, layers)
    return layouts


def _readings(found: Comparison, tokens_a_layer: float) -> tuple[MeasuredReads, ...]:
    """Sum up each measurement: over the rounds that count, or all where none of them has it."""
    rows = []
    for condition in found.conditions:
        for layout, portions in found.portions.items():
            measurement = Measurement(layout, condition)
            readings = readings_of(quiet(found.rounds), measurement)
            takes = []
            for number, usage in readings or readings_of(found.rounds, measurement):
                tokens = len(portions[number].groups) * tokens_a_layer
                takes.append(Take(usage, portions[number].useful_length, tokens))
            rows.append(measured_reads(measurement, takes))
    return tuple(rows)
