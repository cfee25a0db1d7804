"""What a drive can do, and what a pack is worth on it: measured, judged, and told in numbers.

Nothing is known beforehand: the same experts are read in the same order from the pack and from the
shards, and where that makes no difference the verdict says so.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moepack.bench import drive, replay, workload
from moepack.bench.replay import Access, Measurement
from moepack.bench.report import BenchReport, RoutedReads, measured_reads, surface_point
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import Gain, judge, notes, verdict
from moepack.bench.workload import RoutedLayer, Workload
from moepack.errors import RequestError
from moepack.hotness import measure
from moepack.hotness.stored import stored_counts
from moepack.keys import ExpertKey
from moepack.reading.pack import Pack
from moepack.source.experts import Experts, find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.storage import probe
from moepack.storage.backend import Backend

MAX_DEPTH = 256
MAX_TOKENS = 512
"""Tokens that are taken from a trace or drawn; most drives are done with `length` bytes before."""

AnyPath = str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Is called after each measurement, with 1 and the number of all measurements."""


class Settings(NamedTuple):
    """How much is measured: see `bench_pack`."""

    depths: tuple[int, ...] = (1, 4, 16)
    rounds: int = 4
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
            ("number of rounds", self.rounds, 1),
            ("length in bytes", self.length, 1),
            ("time in seconds", self.point_seconds, 0),
        ):
            if not value >= lowest:
                raise RequestError(f"not a {what}", expected=f">= {lowest}", found=value)


class Model(NamedTuple):
    """The source that a pack was made from, and its experts."""

    source: Source
    experts: Experts


def bench_pack(
    path: AnyPath,
    *,
    source: AnyPath | Sequence[AnyPath] | None = None,
    trace: str | None = None,
    hotness: str | None = None,
    experts_used: int | None = None,
    backend: str = "auto",
    depths: Sequence[int] = (1, 4, 16),
    rounds: int = 4,
    length: int = 256 << 20,
    point_seconds: float = 0.25,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure the drive that the pack at `path` lies on, and what the pack is worth there.

    `source` is what the pack was made from, to compare with. The experts that are read are those of
    a `trace`; else `experts_used` a layer (by default as many as the source says) are drawn by a
    file of `hotness`, by the pack's own, or evenly. `depths` are reads in flight, `length` the
    bytes of blobs in each measurement, `point_seconds` the time for each point of the surface, 0
    for no surface. Raises RequestError for what cannot be, and what opening and reading raise.
    """
    settings = Settings(tuple(sorted(set(depths))), rounds, length, point_seconds)
    settings.check()
    if trace is not None and hotness is not None:
        raise RequestError("a trace and hotness at once: give one of them")
    with Pack(path) as pack:
        model = None if source is None else _open_model(source)
        reads = _choose_workload(pack, model, trace, hotness, experts_used)
        chosen, why = probe.choose(backend, pack.file_paths, max(settings.depths))
        try:
            return _run(pack, model, reads, chosen, why, settings, progress)
        finally:
            chosen.close()


def _open_model(paths: AnyPath | Sequence[AnyPath]) -> Model:
    source = open_source([paths] if isinstance(paths, str | os.PathLike) else paths)
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
    stated = None if model is None else shape_of(*model).experts_used
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


def _run(
    pack: Pack,
    model: Model | None,
    reads: Workload,
    backend: Backend,
    why: str,
    settings: Settings,
    progress: Progress | None,
) -> BenchReport:
    """Measure the drive's surface and the routed reads; return all that was found."""
    layers = fit(pack, reads.layers, settings.length)
    accesses = _accesses(pack, model, layers)
    measurements = measurements_of(tuple(accesses), settings.depths)
    files = [(path, path.stat().st_size) for path in pack.file_paths]
    grid = drive.grid(files) if settings.point_seconds else []
    total = len(grid) + settings.rounds * len(measurements)

    def advance() -> None:
        if progress is not None:
            progress(1, total)

    surface = drive.measure(backend, files, grid, settings.point_seconds, advance)
    usages, was_cold = replay.measure(backend, accesses, measurements, settings.rounds, advance)
    tokens = len(layers) * reads.token_count / len(reads.layers)
    useful = accesses["parts"].length
    gains = _judge_all(usages) if model is not None else ()
    pack_length = sum(length for _, length in files)
    return BenchReport(
        pack=str(pack.path),
        pack_length=pack_length,
        backend=backend.name,
        why=why,
        surface=tuple(surface_point(point, usage) for point, usage in surface.items()),
        routing=RoutedReads(reads.origin, len(layers), tokens, useful),
        readings=tuple(measured_reads(key, usages[key], useful, tokens) for key in measurements),
        cold_is_assured=was_cold,
        gains=gains,
        verdict=verdict(gains),
        notes=notes(backend.name, pack_length, was_cold),
    )


def fit(pack: Pack, layers: Sequence[RoutedLayer], length: int) -> list[RoutedLayer]:
    """Return the first routed layers whose blobs have `length` bytes, or all; at least one."""
    fitting: list[RoutedLayer] = []
    for routed in layers:
        if fitting and length <= 0:
            break
        length -= sum(pack.locate(routed.layer, expert).length for expert in routed.experts)
        fitting.append(routed)
    return fitting


def _accesses(pack: Pack, model: Model | None, layers: Sequence[RoutedLayer]) -> dict[str, Access]:
    """List what is compared, by its layout."""
    accesses = {"blobs": replay.blobs(pack, layers), "parts": replay.parts(pack, layers)}
    if model is not None:
        accesses["slices"] = replay.slices(model.source, model.experts, pack, layers)
    return accesses


def measurements_of(layouts: Sequence[str], depths: Sequence[int]) -> list[Measurement]:
    """List how each layout is read: direct at each depth, mapped, and both with a warm cache."""
    ways = [
        *(("direct", "cold", depth) for depth in depths),
        *(("mapped", state, 1) for state in ("cold", "warm")),
        ("direct", "warm", depths[0]),
    ]
    return [Measurement(layout, *way) for way in ways for layout in layouts]


def _judge_all(usages: Mapping[Measurement, Sequence[Usage]]) -> tuple[Gain, ...]:
    """Judge each measurement of whole blobs against the same of the shards' slices."""
    return tuple(
        judge(measurement, replay.ratios(ours, usages[measurement._replace(layout="slices")]))
        for measurement, ours in usages.items()
        if measurement.layout == "blobs"
    )
