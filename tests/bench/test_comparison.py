"""A comparison fits its time, on fast drives and slow ones, and announces it."""

from collections import Counter
from pathlib import Path

import pytest

import moepack
from moepack.bench import run, workload
from moepack.bench.comparison import PORTION_LENGTH, ROUNDS, Rig, Schedule, cut, schedule
from moepack.bench.drive import LENGTHS, Point
from moepack.bench.drive import measure as measure_surface
from moepack.bench.rounds import Measurement, plan_of, try_out
from moepack.bench.run import BenchReport
from moepack.bench.verdict import MIN_ROUNDS
from moepack.report import bench_text
from moepack.report.values import seconds_text
from moepack.source.shards import open_source
from tests.support.models import first_shard
from tests.support.synthetic_drive import CALM, SyntheticDrive, nothing_is_cached

MIB = 1 << 20


# How it is planned.


@pytest.mark.parametrize(
    ("lengths", "most", "sizes"),
    [
        ([PORTION_LENGTH // 2] * 7, 100, [2, 2, 3]),
        ([PORTION_LENGTH // 2] * 7, 1, [1] * 7),
        ([PORTION_LENGTH // 3] * 7, 2, [2, 2, 3]),
        ([PORTION_LENGTH * 2] * 3, 5, [1, 1, 1]),
        ([1], 9, [1]),
        ([1] * 5, 9, [5]),
    ],
)
def test_portions_are_as_long_as_time_and_a_bound_allow(
    lengths: list[int], most: int, sizes: list[int]
) -> None:
    assert cut(lengths, most) == sizes


@pytest.mark.parametrize(
    ("layer_seconds", "seconds", "expected_seconds"),
    [
        (0.001, None, 45),
        (5, None, 5 * MIN_ROUNDS),
        (50, None, 600),
        (51, None, 45),
        (5, 10, 10),
        (5, 0, 0),
    ],
)
def test_a_slow_drive_takes_longer_where_that_gives_a_verdict(
    layer_seconds: float, seconds: float | None, expected_seconds: float
) -> None:
    lengths = [MIB] * 400
    planned = schedule(layer_seconds, lengths, seconds)
    assert planned.seconds == expected_seconds
    assert planned.needed_seconds == MIN_ROUNDS * layer_seconds
    assert sum(planned.sizes) == 400
    assert planned.portion_length == pytest.approx(400 * MIB / len(planned.sizes), abs=1)
    assert planned.portion_length <= 2 * PORTION_LENGTH
    enough = planned.seconds >= planned.needed_seconds
    assert not enough or planned.round_count >= min(MIN_ROUNDS, ROUNDS)
    text = bench_text.announced(planned)
    assert ("a verdict takes more" in text) is not enough
    assert f"about {seconds_text(1.2 * expected_seconds)}, " in text


def test_sizes_leave_time_for_rounds() -> None:
    """With 16 MiB a round would take 16 times 0.5 s, and there would be 5 of them in 45 s."""
    planned = schedule(0.5, [MIB] * 400, None)
    assert Counter(planned.sizes).most_common(1)[0][0] == 2
    assert 36 <= planned.round_count <= 45


@pytest.mark.parametrize(("takes", "rounds"), [(0.02, 3), (0.5, 1)])
def test_the_trial_takes_the_shortest_of_some_rounds(takes: float, rounds: int) -> None:
    """The first opens files, and any may be struck; on a slow drive one has to do."""
    plan, now = plan_of((1, 4), ("blobs", "parts", "slices")), [0.0]
    everything = {
        Measurement(layout, condition) for layout in plan.layouts for condition in plan.conditions
    }
    often = 2 * len(plan.often)
    in_mean = often + (len(everything) - often) / 3
    calls: list[tuple[Measurement, int]] = []

    def read(measurement: Measurement, portion: int) -> None:
        is_struck = len(calls) == 40
        now[0] += takes if calls and not is_struck else takes + 0.3
        calls.append((measurement, portion))

    seconds = try_out(read, plan, 5, lambda: now[0])
    assert len(calls) == rounds * len(everything)
    assert {one[0] for one in calls[: len(everything)]} == everything
    assert {one[1] for one in calls} == set(range(5))
    assert seconds == pytest.approx(takes * in_mean, abs=1e-9 if rounds > 1 else 0.3)


# Drives that only calculate what reads take.


def benched(
    pack_path: Path, latency: float, seconds: float | None = None
) -> tuple[BenchReport, float, Schedule]:
    """Run all of `bench` on a drive of so much latency; return how long it took there as well."""
    drive = SyntheticDrive(0, CALM, 1.0, latency=latency)
    rig = Rig(drive.backend, drive.clock, drive.disturbance)
    source = open_source([first_shard("qwen3moe")])
    announced: list[Schedule] = []
    with moepack.open(pack_path) as pack, nothing_is_cached():
        reads = workload.from_counts({}, pack.shape, 4, 200, "")
        settings = run.Settings((1, 4), seconds, point_seconds=0)
        report = run.measure_pack(pack, source, reads, rig, settings, announce=announced.append)
    return report, drive.clock(), announced[0]


@pytest.mark.parametrize("latency", [20e-3, 0.5])
def test_a_slow_drive_gets_a_verdict_in_the_time_that_was_said(
    latency: float, packs: dict[str, Path]
) -> None:
    """Where each read takes as long, one instead of three is a gain, also four at a time."""
    report, took, planned = benched(packs["qwen3moe"], latency)
    assert report.outcome == "gain", report.verdict
    assert report.seconds == planned.seconds
    assert took <= planned.total_seconds + 6 * planned.needed_seconds / MIN_ROUNDS
    assert planned.seconds == 45 if latency < 0.1 else 45 < planned.seconds < 600
    assert planned.round_count / 2 <= report.round_count <= planned.round_count * 2


def test_what_is_not_decided_names_a_time_that_decides_it(packs: dict[str, Path]) -> None:
    report, _, planned = benched(packs["qwen3moe"], 0.1, seconds=4)
    assert report.verdict.startswith("Not decided in 4 s: there was time for ")
    assert report.packing_gains is None
    assert planned.round_count < 9
    assert report.needed_seconds is not None
    assert f"`seconds={report.needed_seconds:.0f}`." in report.verdict
    again, took, _ = benched(packs["qwen3moe"], 0.1, report.needed_seconds)
    assert again.outcome == "gain"
    assert took < 1.5 * report.needed_seconds


def test_the_surface_leaves_out_what_would_take_too_long(tmp_path: Path) -> None:
    """16 MiB at 10 MB/s, 32 of them in flight, would take a minute."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(max(LENGTHS))
    drive = SyntheticDrive(0, CALM, 1.0, bandwidth=10e6)
    points = [Point(length, depth, "random") for length in LENGTHS for depth in (1, 4)]
    files = [(path, max(LENGTHS))]
    surface = measure_surface(drive.backend(4), files, points, 0.1, clock=drive.clock)
    assert [(one.length, one.depth) for one in surface] == [
        (length, depth) for length, depth, _ in points if length * depth < 4 * MIB
    ]
    assert drive.clock() < len(points) * 0.5
