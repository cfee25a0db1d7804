"""What a drive can do, and what a pack is worth on it: measured, judged, and told in numbers.

Nothing is known beforehand: the same experts are read in the same order from the pack and from the
shards, and where that makes no difference the verdict says so.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moepack.bench import drive, replay
from moepack.bench.replay import Reading
from moepack.bench.timed_reads import Usage
from moepack.bench.workload import RoutedStep, Routing
from moepack.reading.pack import Pack
from moepack.source.experts import Experts
from moepack.source.shards import Source
from moepack.storage.backend import Backend

WORTH = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""


class Settings(NamedTuple):
    """How much is measured.

    `length` is the bytes of blobs in each reading, `point_seconds` the time for each point of the
    surface, 0 for no surface.
    """

    depths: tuple[int, ...] = (1, 4, 16)
    rounds: int = 4
    length: int = 256 << 20
    point_seconds: float = 0.25


class Judgement(NamedTuple):
    """How many times as fast as the shards the pack's blobs are: median and spread over the rounds.

    `word` is `gain`, `loss`, or `none` where the rounds do not agree or differ by less than 5 %.
    """

    way: str
    state: str
    depth: int
    median: float
    lowest: float
    highest: float
    word: str


def judge(reading: Reading, ratios: Sequence[float]) -> Judgement:
    """Judge the ratios of all rounds of a reading of blobs."""
    median, lowest, highest = statistics.median(ratios), min(ratios), max(ratios)
    word = "none"
    if median >= WORTH and lowest > 1:
        word = "gain"
    elif median <= 1 / WORTH and highest < 1:
        word = "loss"
    return Judgement(reading.way, reading.state, reading.depth, median, lowest, highest, word)


def verdict(judgements: Sequence[Judgement]) -> str:
    """Say in words what packing gains, and at which depth the gain ends."""
    if not judgements:
        return "No verdict: without --source there is nothing to compare the pack with."
    direct = [one for one in judgements if one.way == "direct" and one.state == "cold"]
    gains = [one for one in direct if one.word == "gain"]
    losses = [one for one in direct if one.word == "loss"]
    said = []
    if gains:
        said.append(f"Packing gains here: {_times(gains)} as fast as reading from the shards.")
        deeper = [one.depth for one in direct if one.depth > gains[-1].depth]
        if deeper:
            said.append(f"The gain ends before depth {deeper[0]}.")
    else:
        depths = ", ".join(str(one.depth) for one in direct)
        said.append(f"Packing gains nothing here for direct reads (at depth {depths}).")
    if losses:
        said.append(f"It loses: {_times(losses)} as fast as reading from the shards.")
    mapped = [one for one in judgements if one.way == "mapped"]
    words = [
        f"{'as fast' if one.word == 'none' else f'{one.median:.2f} times as fast'} {one.state}"
        for one in mapped
    ]
    return " ".join([*said, f"Memory-mapped it reads {' and '.join(words)}."])


def _times(judgements: Sequence[Judgement]) -> str:
    """Write `at depth 1 1.94 times, at depth 4 1.20 times`."""
    return ", ".join(f"at depth {one.depth} {one.median:.2f} times" for one in judgements)


def fit(pack: Pack, steps: Sequence[RoutedStep], length: int) -> list[RoutedStep]:
    """Give the first steps whose blobs have `length` bytes, or all; at least one."""
    fitting: list[RoutedStep] = []
    for step in steps:
        if fitting and length <= 0:
            break
        length -= sum(pack.locate(step.layer, expert).length for expert in step.experts)
        fitting.append(step)
    return fitting


def readings(layouts: Sequence[str], depths: Sequence[int]) -> list[Reading]:
    """List what is compared: direct at each depth, mapped, and both with a warm page cache."""
    cold = [Reading(one, "direct", "cold", depth) for depth in depths for one in layouts]
    mapped = [Reading(one, "mapped", state, 1) for state in ("cold", "warm") for one in layouts]
    return [*cold, *mapped, *(Reading(one, "direct", "warm", depths[0]) for one in layouts)]


def run(
    pack: Pack,
    backend: Backend,
    routing: Routing,
    model: tuple[Source, Experts] | None,
    settings: Settings,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measure the drive's surface and the routed reads; give all that was found.

    `model` is the source that the pack was made from, and its experts; without it there is no
    comparison with the shards. `progress` is called with 1 after each measurement.
    """
    files = _files(pack)
    points = []
    if settings.point_seconds:
        points = drive.measure(backend, files, settings.point_seconds, progress)
    steps = fit(pack, routing.steps, settings.length)
    accesses = {"blobs": replay.blobs(pack, steps), "parts": replay.parts(pack, steps)}
    if model is not None:
        accesses["slices"] = replay.slices(*model, pack, steps)
    planned = readings(tuple(accesses), settings.depths)
    usages, was_cold = replay.measure(backend, accesses, planned, settings.rounds, progress)
    tokens = len(steps) * routing.token_count / len(routing.steps)
    useful = sum(one.length for step in accesses["parts"].steps for one in step)
    judgements = _judge_all(usages) if model is not None else []
    return {
        "pack": str(pack.path),
        "pack_length": sum(size for _, size in files),
        "backend": backend.name,
        "surface": [_point(point) for point in points],
        "routing": {
            "origin": routing.origin,
            "step_count": len(steps),
            "token_count": tokens,
            "useful_length": useful,
        },
        "readings": [_reading(one, usages[one], useful, tokens) for one in planned],
        "cold_is_assured": was_cold,
        "gains": [one._asdict() for one in judgements],
        "verdict": verdict(judgements),
    }


def measurement_count(pack: Pack, with_source: bool, settings: Settings) -> int:
    """Say how often `run` will call its progress."""
    points = len(drive.grid(_files(pack))) if settings.point_seconds else 0
    layouts = ("blobs", "parts", "slices") if with_source else ("blobs", "parts")
    return points + settings.rounds * len(readings(layouts, settings.depths))


def _files(pack: Pack) -> list[tuple[Path, int]]:
    return [(path, path.stat().st_size) for path in pack.file_paths]


def _judge_all(usages: Mapping[Reading, Sequence[Usage]]) -> list[Judgement]:
    """Judge each reading of whole blobs against the same of the shards' slices."""
    return [
        judge(reading, replay.ratios(ours, usages[reading._replace(layout="slices")]))
        for reading, ours in usages.items()
        if reading.layout == "blobs"
    ]


def _point(point: drive.Point) -> dict[str, Any]:
    return {
        "length": point.length,
        "depth": point.depth,
        "order": point.order,
        "bytes_per_second": point.usage.length / point.usage.seconds,
        "cpu_seconds_per_gib": _cpu_per_gib(point.usage, point.usage.length),
        "read_count": point.usage.read_count,
    }


def _reading(
    reading: Reading, usages: Sequence[Usage], useful: int, tokens: float
) -> dict[str, Any]:
    """Sum up the rounds of one reading; speeds count the bytes of the parts, without padding."""
    speeds = [useful / usage.seconds for usage in usages]
    return {
        **reading._asdict(),
        "bytes_per_second": statistics.median(speeds),
        "bytes_per_second_lowest": min(speeds),
        "bytes_per_second_highest": max(speeds),
        "cpu_seconds_per_gib": statistics.median(_cpu_per_gib(one, useful) for one in usages),
        "seconds_per_token": statistics.median(one.seconds for one in usages) / tokens,
        "reads_per_token": usages[0].read_count / tokens,
        "length_per_token": usages[0].length / tokens,
    }


def _cpu_per_gib(usage: Usage, length: int) -> float:
    return usage.cpu_seconds / (length / (1 << 30))
