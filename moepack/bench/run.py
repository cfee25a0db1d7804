"""The command `bench`: a drive measured, and a pack on it compared with the shards.

The same experts are read in the same order from the pack and from the shards, and the verdict says
whether that makes a difference.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from moepack.bench import drive, workload
from moepack.bench.comparison import (
    SMALL_LENGTH,
    WARM_UP_SHARE,
    Gain,
    Round,
    compare,
    judge,
    notes,
    verdict,
)
from moepack.bench.drive import SurfacePoint
from moepack.bench.measuring import Meter, spread
from moepack.bench.workload import Groups, RoutedLayer, Workload
from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.phases import Progress
from moepack.common.shape import ExpertKey
from moepack.common.sizes import Size, as_list, parse_size
from moepack.pack.opening.open_model import open_model, open_shards
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.storage import probe
from moepack.traces.hotness import measure
from moepack.traces.hotness.coverage import stored_counts

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
    """The rounds of one layout at one depth, summed up; speeds count the useful bytes alone."""

    layout: str
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

    `why` is the reason for the `backend`; `cold_is_assured` is None if unknown. `gains` are empty
    without a source to compare with. `outcome` is the `word` of the gain that the verdict is about,
    None if there is no verdict.
    """

    pack: str
    pack_length: int
    backend: str
    why: str
    surface: tuple[SurfacePoint, ...]
    routing: RoutedReads
    readings: tuple[MeasuredReads, ...]
    cold_is_assured: bool | None
    round_count: int
    gains: tuple[Gain, ...]
    seconds: float
    outcome: str | None
    verdict: str
    notes: tuple[str, ...]


def bench_pack(
    path: AnyPath,
    *,
    source: PathOrPaths | None = None,
    trace: AnyPath | None = None,
    hotness: AnyPath | None = None,
    experts_used: int | None = None,
    backend: str = "auto",
    depths: int | Sequence[int] = (1, 4, 16),
    seconds: float = 45.0,
    length: Size = 256 << 20,
    point_seconds: float = 0.25,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure the drive of the pack at `path`, and the gain of the pack there.

    Of a GGUF at `path` the reads from the shards are measured, and nothing is compared. `source` is
    the model that the pack was made from, to compare with. The experts come from a `trace`; without
    one, `experts_used` per layer (by default the model's number) are drawn by a file of `hotness`,
    by the pack's own, or uniformly. `depths` are reads in flight, `length` the
    bytes of blobs to read repeatedly, fewer on a slow drive. `point_seconds` is the time for each
    point of the surface, 0 for no surface, `seconds` the time for the comparison. Raises
    RequestError for bad arguments, and what opening and reading raise.
    """
    trace, hotness = (None if path is None else os.fspath(path) for path in (trace, hotness))
    depths = sorted(set(as_list(depths)))
    length = parse_size(length, "length")
    _check(depths, seconds, length, point_seconds)
    if trace is not None and hotness is not None:
        raise RequestError("a trace and hotness at once: give one of them")
    if source is not None and named_pack(path) is None:
        hint = "a source needs a pack of it: `moepack pack` makes one"
        raise RequestError("not a pack, and nothing to compare", path=path, hint=hint)
    with open_model(path) as pack, ExitStack() as stack:
        pack.require_files()
        pack.require_complete()
        shards = None if source is None else stack.enter_context(open_shards(source))
        reads = _choose_workload(pack, shards, trace, hotness, experts_used)
        files = [(path, path.stat().st_size) for path in pack.file_paths]
        sides = _sides(pack, shards, fit(pack, reads.layers, length))
        chosen, why = probe.choose(backend, pack.file_paths)
        grid = drive.grid(files) if point_seconds else []
        comparison_seconds = (1 + WARM_UP_SHARE) * seconds
        meter = Meter(len(grid) * point_seconds + comparison_seconds, progress)
        with closing(chosen):
            surface = drive.measure(chosen, files, grid, point_seconds, meter.advance)
        rounds, portions, was_cold = compare(pack, sides, chosen.name, depths, seconds, meter)
        meter.finish()
    pack_length = sum(length for _, length in files)
    gains = judge(rounds, depths) if source is not None else ()
    outcome, text = verdict(gains, rounds, chosen.name, was_cold)
    layer_tokens = reads.token_count / len(reads.layers)
    return BenchReport(
        pack=str(pack.path),
        pack_length=pack_length,
        backend=chosen.name,
        why=why,
        surface=surface,
        routing=_routed_reads(reads.origin, sides, portions, layer_tokens),
        readings=tuple(
            _measured_reads(layout, depth, groups, rounds, layer_tokens)
            for depth in depths
            for layout, groups in sides.items()
        ),
        cold_is_assured=None if was_cold and pack_length < SMALL_LENGTH else was_cold,
        round_count=len(rounds),
        gains=gains,
        seconds=seconds,
        outcome=outcome,
        verdict=text,
        notes=notes(chosen.name, was_cold, pack_length),
    )


def _check(depths: Sequence[int], seconds: float, length: int, point_seconds: float) -> None:
    """Raise RequestError for a setting out of bounds."""
    if not depths or not all(1 <= depth <= MAX_DEPTH for depth in depths):
        raise RequestError(
            "not a list of depths",
            expected=f"numbers from 1 to {MAX_DEPTH}",
            found=",".join(map(str, depths)),
        )
    for name, value, lowest in (
        ("time in seconds", seconds, 0),
        ("length in bytes", length, 1),
        ("time for a point in seconds", point_seconds, 0),
    ):
        if not lowest <= value < math.inf:
            raise RequestError(f"not a {name}", expected=f">= {lowest}", found=value)


def _choose_workload(
    pack: Pack,
    shards: Pack | None,
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
    of_model = shape.experts_used or (shards and shards.shape.experts_used)
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


def fit(pack: Pack, layers: Sequence[RoutedLayer], length: int) -> list[RoutedLayer]:
    """Return the first routed layers whose blobs have `length` bytes, or all; at least one."""
    fitting: list[RoutedLayer] = []
    for routed in layers:
        if fitting and length <= 0:
            break
        length -= sum(pack.hotness(routed.layer, expert).length for expert in routed.experts)
        fitting.append(routed)
    return fitting


def _sides(pack: Pack, shards: Pack | None, layers: Sequence[RoutedLayer]) -> dict[str, Groups]:
    """Return the layouts to read, by name: a GGUF, or an index of one, has slices alone."""
    experts = workload.blobs(pack, layers)
    if shards is not None:
        return {"blobs": experts, "slices": workload.slices(shards, pack, layers)}
    are_shards = any(file.is_shard for file in pack.index.files)
    return {"slices" if are_shards else "blobs": experts}


def _routed_reads(
    origin: str, sides: Mapping[str, Groups], portions: Sequence[slice], layer_tokens: float
) -> RoutedReads:
    """Sum up what was read. `layer_tokens` is tokens by routed layers."""
    count = portions[-1].stop
    length = _useful_length(next(iter(sides.values())), slice(count))
    return RoutedReads(origin, count, len(portions), count * layer_tokens, length)


def _useful_length(groups: Groups, portion: slice) -> int:
    experts = (expert for group in groups[portion] for expert in group)
    return sum(part.length for expert in experts for part in expert.parts)


def _measured_reads(
    layout: str, depth: int, groups: Groups, rounds: Sequence[Round], layer_tokens: float
) -> MeasuredReads:
    """Sum up a layout at a depth over all rounds."""
    reads = [
        (one.usages[layout, depth], _useful_length(groups, portion), len(groups[portion]))
        for one in rounds
        for portion in [one.portions[depth]]
    ]
    speed = spread([length / usage.seconds for usage, length, _ in reads])
    seconds = [usage.seconds / (count * layer_tokens) for usage, _, count in reads]
    tokens = sum(count * layer_tokens for _, _, count in reads)
    return MeasuredReads(
        layout,
        depth,
        bytes_per_second=speed.median,
        bytes_per_second_lowest=speed.lowest,
        bytes_per_second_highest=speed.highest,
        cpu_seconds_per_gib=statistics.median(
            usage.cpu_seconds_per_gib(length) for usage, length, _ in reads
        ),
        seconds_per_token=statistics.median(seconds),
        reads_per_token=sum(usage.read_count for usage, _, _ in reads) / tokens,
        length_per_token=sum(usage.length for usage, _, _ in reads) / tokens,
    )
