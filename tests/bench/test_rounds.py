"""Paired rounds, intervals and verdicts, held against drives of which the truth is known."""

import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from moepack.bench import disturbance, rounds
from moepack.bench.disturbance import Disturbance, DisturbanceMonitor
from moepack.bench.measuring import Meter
from moepack.bench.rounds import (
    Condition,
    Measurement,
    Reading,
    Round,
    RoundPlan,
    measurements,
    plan_of,
    undisturbed,
)
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import (
    STRETCHES,
    Gain,
    Verdict,
    cold_is_assured,
    interval,
    judge,
    notes,
    verdict,
)
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory
from moepack.storage.threaded import ThreadedBackend
from tests.support.amounts import amounts
from tests.support.synthetic_drive import CALM, CROWDED, NOISY, ROUGH, SyntheticDrive, Weather

LAYOUTS = ("blobs", "parts", "slices")
READING = 0.02
"""Seconds: so that 45 seconds have some 100 rounds."""

GAIN, LOSS, NO_GAIN = "Packing gains here", "Packing loses here", "No gain here"
OPEN = "Not decided in 45 s"


def measured(drive: SyntheticDrive, seconds: float) -> list[Round]:
    """Measure a drive, at every depth and in every way alike."""

    def read(measurement: Measurement, portion: int) -> Usage:
        takes = READING * drive.takes(measurement.layout != "blobs")
        drive.pass_time(drive.clock() + takes)
        return Usage(takes, 0, 1, 1)

    meter = Meter(seconds, drive.clock, None)
    meter.begin(seconds)
    plan = plan_of((1, 4, 16), LAYOUTS)
    return rounds.measure(read, plan, 12, meter, drive.clock, drive.disturbance)


def said_of(
    gains: Sequence[Gain],
    done: Sequence[Round],
    *,
    backend: str = "uring",
    was_cold: bool | None = True,
    needed_seconds: float = 5,
) -> Verdict:
    return verdict(gains, done, backend, was_cold, 45, needed_seconds)


RIGHT = {1.0: {NO_GAIN, OPEN}, 1.02: {NO_GAIN, OPEN}, 0.9: {LOSS, NO_GAIN}, 1.2: {GAIN}}
"""The verdicts that are right, by the truth."""


@pytest.mark.long
@pytest.mark.parametrize("count", amounts(50, 200))
@pytest.mark.parametrize(
    ("weather", "ratio", "right", "least_share"),
    [
        (CALM, 1.02, {NO_GAIN}, 1.0),
        (NOISY, 0.9, {LOSS, NO_GAIN}, 0.2),
        (ROUGH, 1.02, {LOSS, NO_GAIN}, 0.2),
        (CROWDED, 1.02, {LOSS, NO_GAIN}, 0.2),
        (NOISY, 1.2, {GAIN}, 1.0),
        (ROUGH, 1.2, {GAIN}, 0.9),
        (CROWDED, 1.2, {GAIN}, 0.9),
    ],
)
def test_many_runs_find_what_is_so(
    weather: Weather, ratio: float, right: set[str], least_share: float, count: int
) -> None:
    """Not every one where it is crowded all the time, or struck too often."""
    said: Counter[str] = Counter()
    for seed in range(count):
        done = measured(SyntheticDrive(seed, weather, ratio), 45)
        judgement = said_of(judge(done, plan_of((1, 4, 16), LAYOUTS).conditions), done)
        headline = judgement.text.split(":")[0]
        assert judgement.packing_gains is {GAIN: True, OPEN: None}.get(headline, False)
        said[headline] += 1
    assert sum(said[headline] for headline in right) >= least_share * count
    assert ratio > 1.02 or set(said) <= RIGHT[ratio]


def test_crowded_rounds_are_left_out_and_their_time_is_given_back() -> None:
    drive = SyntheticDrive(0, CROWDED, 1.0)
    done = measured(drive, 45)
    disturbed = len(done) - len(undisturbed(done))
    assert 0 < disturbed < len(done)
    assert 46 < drive.clock() <= 92
    gains = judge(done, plan_of((1, 4, 16), LAYOUTS).conditions)
    assert {gain.round_count for gain in gains if gain.way == "raw"} == {len(done) - disturbed}
    assert any("used the drive" in note for note in notes(done, "uring", True, 1 << 40))
    assert not notes(
        [one for one in done if not one.disturbance.is_too_much], "uring", True, 1 << 40
    )


@pytest.mark.parametrize(
    ("shares", "is_too_much"),
    [((None, None), False), ((0.1, 0.1), False), ((0.11, None), True), ((0, 0.11), True)],
)
def test_what_the_system_does_not_tell_disturbs_nothing(
    shares: tuple[float | None, float | None], is_too_much: bool
) -> None:
    assert Disturbance(*shares).is_too_much is is_too_much


def test_reads_of_another_process_are_seen_and_our_own_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(32 << 20))
    os.sync()
    others = DisturbanceMonitor([path])
    backend = ThreadedBackend(direct=True)
    request = ReadRequest(path, 0, map_memory(32 << 20))
    shares = []
    for _ in range(20):  # somebody else may read as well
        if backend.read(request).error is not None:
            pytest.skip("no direct reads here")
        shares.append(others().drive_share)
    backend.close()
    if shares[0] is None:
        pytest.skip("this system does not tell what drives do")
    alone = min(share for share in shares if share is not None)
    command = f"for n in $(seq 20); do dd if={path} of=/dev/null bs=1M iflag=direct; done"
    with subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read()
        theirs = others().drive_share  # before it is waited for: then it counts as one of us
    assert theirs is not None
    assert theirs > alone + 0.1


def test_what_others_read_disturbs_as_long_as_the_drive_works_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that rests nine tenths of the time is not disturbed by who reads as much as we."""
    work = [(0, 0.0)]
    ours, now = [0], [0.0]
    monkeypatch.setattr(disturbance, "drive_of", lambda path: path)
    monkeypatch.setattr(disturbance, "_work_of", lambda drive: work[0])
    monkeypatch.setattr(disturbance, "_own_length", lambda: ours[0])
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    others = DisturbanceMonitor([tmp_path])
    for busy, length, own, share in (
        (1.0, 1000, 1000, 0.0),
        (1.0, 1000, 250, 0.75),
        (0.1, 1000, 500, 0.05),
        (1.5, 1000, 500, 0.5),  # what the system counts is not exact
        (0.0, 0, 0, 0.0),
    ):
        now[0] += 1
        work[0] = (work[0][0] + length, work[0][1] + busy)
        ours[0] += own
        assert others().drive_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("was_cold", "length", "assured"),
    [(True, 1 << 30, True), (True, (1 << 30) - 1, None), (False, 1, False), (None, 1, None)],
)
def test_a_pack_that_a_drive_may_hold_in_its_memory_is_not_called_cold(
    was_cold: bool | None, length: int, assured: bool | None
) -> None:
    assert cold_is_assured(was_cold, length) is assured
    said = any("a small pack" in note for note in notes([], "uring", was_cold, length))
    assert said is (length < 1 << 30)


def orders_of(plan: RoundPlan, count: int) -> list[list[tuple[Condition, list[str]]]]:
    """Return the conditions of each round in their order, with the order of layouts in each."""
    return [
        [
            (condition, [measurement.layout for measurement, _ in several])
            for condition, several in itertools.groupby(steps, lambda step: step[0].condition)
        ]
        for steps in itertools.islice(measurements(plan, 1), count)
    ]


def test_two_sides_of_a_pair_are_neighbours_and_begin_equally_often() -> None:
    plan = plan_of((1, 4), LAYOUTS)
    visited = orders_of(plan, 200)
    assert visited == orders_of(plan, 200), "the same each time"
    for condition in plan.conditions:
        orders = [order for one in visited for visitor, order in one if visitor == condition]
        first = [order.index("blobs") < order.index("slices") for order in orders]
        assert all(abs(order.index("blobs") - order.index("slices")) == 1 for order in orders)
        assert [first[n] + first[n + 1] for n in range(0, len(first) - 1, 2)] == [1] * (
            len(first) // 2
        )
        assert len(set(first[::2])) == 2, "which of them begins is random"
    assert len({tuple(condition for condition, _ in one) for one in visited[1::3]}) > 20


def test_what_no_verdict_is_about_is_measured_in_every_third_round() -> None:
    plan = plan_of((1, 4), LAYOUTS)
    counts = Counter(
        (layout, condition)
        for one in orders_of(plan, 30)
        for condition, order in one
        for layout in order
    )
    assert len(counts) == 3 * len(plan.conditions)
    for (layout, condition), count in counts.items():
        assert count == (30 if layout != "parts" and condition in plan.often else 10)


def test_without_a_source_there_are_no_pairs_and_all_is_measured() -> None:
    plan = plan_of((1,), ("blobs", "parts"))
    for one in orders_of(plan, 9)[::3]:
        assert {condition for condition, _ in one} == set(plan.conditions)
        assert all(sorted(order) == ["blobs", "parts"] for _, order in one)


def test_each_visit_takes_the_next_portion_and_both_sides_the_same() -> None:
    done = measured(SyntheticDrive(0, CALM, 1.0), 10)
    counts: Counter[int] = Counter()
    for one in done:
        for measurement, (portion, _) in one.readings.items():
            other = measurement._replace(layout="slices")
            assert one.readings[other].portion == portion
            counts[portion] += 1
    assert set(counts) == set(range(12))


def test_time_alone_ends_the_rounds_and_one_is_done_without_any() -> None:
    assert len(measured(SyntheticDrive(0, CALM, 1.0), 0)) == 1
    drive = SyntheticDrive(0, CALM, 1.0)
    measured(drive, 5)
    assert 5 <= drive.clock() < 5 + 30 * READING


def test_the_meter_tells_milliseconds_and_the_rest_at_the_end() -> None:
    now = [100.0]
    reports: list[tuple[int, int]] = []
    meter = Meter(3, lambda: now[0], lambda *args: reports.append(args))
    now[0] += 0.5
    meter.advance()
    meter.advance()
    now[0] += 1
    meter.begin(2)
    assert not meter.is_over
    meter.extend(0.5)
    meter.extend(99)
    now[0] += 3.9
    assert not meter.is_over
    now[0] += 0.1
    assert meter.is_over
    now[0] += 7
    meter.finish()
    assert reports == [(500, 3000), (5000, 5500)]


def test_nine_stretches_are_enough_for_95_percent_and_eight_are_not() -> None:
    """Counted: how often fair coins fall so that all of them, or all but one, show one side."""
    shares = {}
    for coins in (STRETCHES - 1, STRETCHES):
        bad = sum(one.bit_count() < 2 or one.bit_count() > coins - 2 for one in range(1 << coins))
        shares[coins] = bad / 2**coins
    assert shares[STRETCHES] == 20 / 512 <= 0.05 < shares[STRETCHES - 1]


def test_an_interval_goes_from_the_second_lowest_stretch_to_the_second_highest() -> None:
    ratios = [2.0, 1.5, 8.0, 4.0, 9.0, 1.0, 4.0, 4.0, 4.0]
    doubled = [ratio for ratio in ratios for _ in range(2)]
    for values in (ratios, doubled, [*doubled, 4.0]):
        assert interval(values) == pytest.approx((4.0, 1.5, 8.0))
    assert interval(ratios[:8]) is None


def test_one_round_that_is_far_off_does_not_move_its_stretch() -> None:
    calm, struck = [1.1] * 40, [1.1] * 40
    struck[7] = 60.0
    assert interval(struck) == pytest.approx(interval(calm))


def test_rounds_that_resemble_their_neighbours_do_not_look_like_many() -> None:
    """Three quarters of a run at 1.0 and one at 1.75: no bound between them is passed."""
    bounds = interval([1.0] * 75 + [1.75] * 25)
    assert bounds is not None
    assert bounds[1:] == pytest.approx((1.0, 1.75))


def rounds_of(*ratios: float) -> list[Round]:
    """Make rounds in which the slices took so many times as long as the blobs."""
    condition = Condition("reader", "cold", 4)
    return [
        Round(
            {
                Measurement("blobs", condition): Reading(0, Usage(1, 0, 1, 1)),
                Measurement("slices", condition): Reading(0, Usage(ratio, 0, 1, 1)),
            },
            Disturbance(None, None),
        )
        for ratio in ratios
    ]


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.5] * 7 + [1.06, 0.5], "gain"),
        ([1.5] * 7 + [1.04, 0.5], "none"),
        ([0.7] * 7 + [0.95, 2.0], "loss"),
        ([0.7] * 7 + [0.96, 2.0], "none"),
        ([1.0] * 9, "none"),
        ([9.0] * 8, "unproven"),
    ],
)
def test_a_gain_is_one_where_all_of_the_interval_is(ratios: list[float], word: str) -> None:
    (gain,) = judge(rounds_of(*ratios), [Condition("reader", "cold", 4)])
    assert (gain.word, gain.round_count) == (word, len(ratios))
    if word == "unproven":
        assert (gain.ratio, gain.low, gain.high) == (None, None, None)
    else:
        assert (gain.low, gain.high) == pytest.approx((sorted(ratios)[1], sorted(ratios)[-2]))


def gain(depth: int, word: str, way: str = "reader", state: str = "cold") -> Gain:
    ratio = {"gain": 1.5, "loss": 0.5, "none": 0.9}[word]
    return Gain(way, state, depth, ratio, ratio - 0.1, ratio + 0.1, 40, word)


RAW = [gain(1, "gain", "raw"), gain(4, "none", "raw")]
MAPPED = [gain(1, "none", "mapped"), gain(1, "loss", "mapped", "warm")]


def shards_read_in(seconds: dict[int, float]) -> list[Round]:
    """Make a round in which a reader took so many seconds for the slices, by depth."""
    readings = {}
    for depth, value in seconds.items():
        condition = Condition("reader", "cold", depth)
        readings[Measurement("slices", condition)] = Reading(0, Usage(value, 0, 1, 1))
    return [Round(readings, Disturbance(None, None))]


def test_the_verdict_says_what_is_gained_and_between_which_bounds() -> None:
    gains = [gain(1, "none"), gain(4, "gain"), *RAW, *MAPPED]
    judgement = said_of(gains, shards_read_in({1: 2, 4: 1}))
    assert (judgement.outcome, judgement.packing_gains, judgement.needed_seconds) == (
        "gain",
        True,
        None,
    )
    assert judgement.text == (
        "Packing gains here: at depth 4, where moepack reads the shards fastest, it reads the pack "
        "1.50 (1.40 to 1.60) times as fast as them. "
        "At other depths: 0.90 (0.80 to 1.00) at depth 1. "
        "Bare backend: 1.50 (1.40 to 1.60) at depth 1, 0.90 (0.80 to 1.00) at depth 4. "
        "Memory-mapped: 0.90 (0.80 to 1.00) cold, 0.50 (0.40 to 0.60) warm. "
        "In brackets: 95 % intervals."
    )


def test_what_a_deeper_queue_gives_without_a_pack_is_no_gain_of_packing() -> None:
    gains = [gain(1, "gain"), gain(4, "none"), gain(16, "gain"), *RAW]
    judgement = said_of(gains, shards_read_in({1: 2, 4: 1, 16: 1.5}))
    assert judgement.packing_gains is False
    assert judgement.text.startswith(f"{NO_GAIN}: at depth 4, ")
    assert "1.50 (1.40 to 1.60) at depth 1, 1.50 (1.40 to 1.60) at depth 16" in judgement.text


@pytest.mark.parametrize(
    ("ratio", "low", "high", "headline", "needed"),
    [
        (1.2, 1.06, 1.3, GAIN, None),
        (0.9, 0.8, 0.95, LOSS, None),
        (1.0, 0.9, 1.05, NO_GAIN, None),
        (1.0, 0.9, 1.08, OPEN, 250),  # (log 1.08 / log 1.05)² times twice 45, rounded up
        (1.1, 1.0, 1.4, OPEN, 400),
        (1.045, 0.9, 1.2, OPEN, None),
    ],
)
def test_a_verdict_is_one_of_four(
    ratio: float, low: float, high: float, headline: str, needed: float | None
) -> None:
    """What is not decided names the time that deciding takes, up to an hour."""
    word = {GAIN: "gain", LOSS: "loss"}.get(headline, "none")
    gains = [Gain("reader", "cold", 4, ratio, low, high, 40, word), *RAW]
    judgement = said_of(gains, shards_read_in({4: 1}), was_cold=None)
    assert judgement.text.startswith(f"{headline}: at depth 4, ")
    assert f"{ratio:.2f} ({low:.2f} to {high:.2f})" in judgement.text
    assert judgement.needed_seconds == needed
    assert judgement.packing_gains is {GAIN: True, OPEN: None}.get(headline, False)
    if headline == OPEN:
        assert ", and a gain is more than 1.05. Deciding " in judgement.text
        said = f"about {needed} s: `seconds={needed}`." if needed else "more than an hour."
        assert said in judgement.text


def test_a_verdict_that_cannot_be_says_why() -> None:
    judgement = said_of([], [])
    assert (judgement.outcome, judgement.packing_gains) == (None, None)
    assert "`source`" in judgement.text
    few = [Gain("reader", "cold", 4, None, None, None, 2, "unproven")]
    judgement = said_of(few, rounds_of(1, 1), needed_seconds=280)
    assert (judgement.outcome, judgement.packing_gains, judgement.needed_seconds) == (
        "undecided",
        None,
        300,
    )
    assert judgement.text == (
        f"{OPEN}: there was time for 2 rounds, and it takes 9. "
        "Deciding takes about 300 s: `seconds=300`."
    )
    crowded = [one._replace(disturbance=Disturbance(0.5, None)) for one in rounds_of(1, 1, 1)]
    judgement = said_of(few, [*crowded, *rounds_of(1, 1)])
    assert judgement.text == (
        f"{OPEN}: in 3 of 5 rounds other processes used the drive or the CPUs, 2 are left, and it "
        "takes 9; measure when they rest. Deciding takes about 300 s: `seconds=300`."
    )
    judgement = said_of(few, crowded)
    assert judgement.needed_seconds is None
    assert judgement.text.endswith("0 are left, and it takes 9; measure when they rest.")
    judgement = said_of(few, rounds_of(1), needed_seconds=9000)
    assert judgement.text.endswith("it takes 9. Deciding would take more than an hour.")


@pytest.mark.parametrize("was_cold", [False, None])
def test_what_may_be_memory_is_no_gain_of_a_drive(was_cold: bool | None) -> None:
    gains = [gain(4, "gain"), *RAW, *MAPPED]
    done = shards_read_in({4: 1})
    judgement = said_of(gains, done, backend="buffered", was_cold=was_cold)
    assert judgement.packing_gains is None
    assert judgement.text == "No verdict: the reads may have come from the page cache."
    assert said_of(gains, done, backend="direct", was_cold=was_cold).packing_gains is True
    assert said_of(gains, done, backend="buffered").packing_gains is True
