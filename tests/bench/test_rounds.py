"""Paired rounds, intervals and verdicts, held against drives of which the truth is known."""

import itertools
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from moepack.bench import rounds
from moepack.bench.disturbance import Disturbance, Others
from moepack.bench.interval import STRETCHES, interval
from moepack.bench.meter import Meter
from moepack.bench.rounds import Condition, Measurement, Reading, Round, quiet, visiting
from moepack.bench.timed_reads import Usage
from moepack.bench.verdict import Gain, cold_is_assured, judge, notes, verdict
from moepack.bench.ways import plan_of
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import map_memory
from moepack.storage.threaded import ThreadedBackend
from tests.support.amounts import amounts
from tests.support.synthetic_drive import CALM, CROWDED, NOISY, ROUGH, SyntheticDrive, Weather

LAYOUTS = ("blobs", "parts", "slices")
READING = 0.02
"""Seconds: so that 45 seconds have some 100 rounds."""

GAIN, NO_GAIN = "Packing gains here", "No gain is shown here"


def measured(drive: SyntheticDrive, seconds: float) -> list[Round]:
    """Measure a drive, at every depth and in every way alike."""

    def read(measurement: Measurement, portion: int) -> Usage:
        takes = READING * drive.takes(measurement.layout != "blobs")
        drive.pass_time(drive.clock() + takes)
        return Usage(takes, 0, 1, 1)

    meter = Meter(0, seconds, drive.clock, None)
    meter.begin()
    plan = plan_of((1, 4, 16), LAYOUTS)
    return rounds.measure(read, plan, 12, meter, drive.clock, drive.others)


def headlines(weather: Weather, ratio: float, count: int) -> Counter[str]:
    """Count the headlines of so many runs on drives on which `ratio` is the truth."""
    said = []
    for seed in range(count):
        done = measured(SyntheticDrive(seed, weather, ratio), 45)
        gains = judge(done, plan_of((1, 4, 16), LAYOUTS).conditions)
        is_gain, text = verdict(gains, done, "uring", was_cold=True)
        said.append(text.split(":")[0])
        assert is_gain is (said[-1] == GAIN)
    return Counter(said)


@pytest.mark.parametrize(("ratio", "headline"), [(1.0, NO_GAIN), (1.02, NO_GAIN), (1.2, GAIN)])
@pytest.mark.parametrize("weather", [NOISY, ROUGH])
def test_ten_runs_give_the_same_verdict_ten_times(
    weather: Weather, ratio: float, headline: str
) -> None:
    assert headlines(weather, ratio, 10) == {headline: 10}


@pytest.mark.long
@pytest.mark.parametrize("count", amounts(50, 200))
@pytest.mark.parametrize(
    ("weather", "ratio"),
    [(CALM, 1.02), (NOISY, 0.9), (NOISY, 1.02), (ROUGH, 1.0), (ROUGH, 1.02), (CROWDED, 1.02)],
)
def test_no_gain_is_found_where_there_is_none(weather: Weather, ratio: float, count: int) -> None:
    assert headlines(weather, ratio, count) == {NO_GAIN: count}


@pytest.mark.long
@pytest.mark.parametrize("count", amounts(50, 200))
@pytest.mark.parametrize(
    ("weather", "ratio"), [(CALM, 1.2), (NOISY, 1.2), (ROUGH, 1.3), (ROUGH, 1.5)]
)
def test_a_gain_is_found_where_there_is_one(weather: Weather, ratio: float, count: int) -> None:
    assert headlines(weather, ratio, count) == {GAIN: count}


@pytest.mark.long
@pytest.mark.parametrize("count", amounts(50, 200))
@pytest.mark.parametrize("weather", [ROUGH, CROWDED])
def test_in_bad_weather_a_small_gain_is_mostly_found(weather: Weather, count: int) -> None:
    """Not where it is crowded all the time, or struck too often."""
    assert headlines(weather, 1.2, count)[GAIN] >= 0.9 * count


def test_crowded_rounds_are_left_out_and_their_time_is_given_back() -> None:
    drive = SyntheticDrive(0, CROWDED, 1.0)
    done = measured(drive, 45)
    disturbed = len(done) - len(quiet(done))
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
    others = Others([path])
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
    assert min(share for share in shares if share is not None) < 0.5
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read()
        theirs = others().drive_share  # before it is waited for: then it counts as one of us
    assert theirs is not None
    assert theirs > 0.5


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


def test_two_sides_of_a_pair_are_neighbours_and_begin_equally_often() -> None:
    plan = plan_of((1, 4), LAYOUTS)
    visited = list(itertools.islice(visiting(plan), 200))
    assert visited == list(itertools.islice(visiting(plan), 200)), "the same each time"
    for condition in plan.conditions:
        orders = [order for one in visited for visitor, order in one if visitor == condition]
        first = [order.index("blobs") < order.index("slices") for order in orders]
        assert all(abs(order.index("blobs") - order.index("slices")) == 1 for order in orders)
        assert [first[n] + first[n + 1] for n in range(0, len(first) - 1, 2)] == [1] * (
            len(first) // 2
        )
        assert len(set(first[::2])) == 2, "which of them begins is random"
    assert len({tuple(condition for condition, _ in one) for one in visited[2::3]}) > 20


def test_what_no_verdict_is_about_is_measured_in_every_third_round() -> None:
    plan = plan_of((1, 4), LAYOUTS)
    counts = Counter(
        (layout, condition)
        for one in itertools.islice(visiting(plan), 1, 31)
        for condition, order in one
        for layout in order
    )
    assert len(counts) == 3 * len(plan.conditions)
    for (layout, condition), count in counts.items():
        assert count == (30 if layout != "parts" and condition in plan.often else 10)


def test_without_a_source_there_are_no_pairs_and_all_is_measured() -> None:
    plan = plan_of((1,), ("blobs", "parts"))
    for one in itertools.islice(visiting(plan), 2):
        assert {condition for condition, _ in one} == set(plan.conditions)
        assert all(sorted(order) == ["blobs", "parts"] for _, order in one)


def test_each_visit_takes_the_next_portion_and_both_sides_the_same() -> None:
    done = measured(SyntheticDrive(0, CALM, 1.0), 10)
    seen: Counter[int] = Counter()
    for one in done:
        for measurement, (portion, _) in one.readings.items():
            other = measurement._replace(layout="slices")
            assert one.readings[other].portion == portion
            seen[portion] += 1
    assert set(seen) == set(range(12))


def test_time_alone_ends_the_rounds_and_one_is_done_without_any() -> None:
    assert len(measured(SyntheticDrive(0, CALM, 1.0), 0)) == 1
    drive = SyntheticDrive(0, CALM, 1.0)
    measured(drive, 5)
    assert 5 <= drive.clock() < 5 + 30 * READING


def test_the_meter_tells_milliseconds_and_the_rest_at_the_end() -> None:
    now = [100.0]
    told: list[tuple[int, int]] = []
    meter = Meter(1, 2, lambda: now[0], lambda *args: told.append(args))
    now[0] += 0.5
    meter.advance()
    meter.advance()
    now[0] += 1
    meter.begin()
    assert not meter.is_over
    meter.put_off(0.5)
    meter.put_off(99)
    now[0] += 3.9
    assert not meter.is_over
    now[0] += 0.1
    assert meter.is_over
    now[0] += 7
    meter.finish()
    assert told == [(500, 3000), (5000, 5500)]


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
    found = interval([1.0] * 75 + [1.75] * 25)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1.0, 1.75))


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
    ratio = {"gain": 1.5, "loss": 0.5, "none": 1.0}[word]
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
    assert verdict(gains, shards_read_in({1: 2, 4: 1}), "uring", was_cold=True) == (
        True,
        "Packing gains here: at depth 4, where moepack reads the shards fastest, it reads the pack "
        "1.50 (1.40 to 1.60) times as fast as them. "
        "At other depths: 1.00 (0.90 to 1.10) at depth 1. "
        "Bare backend: 1.50 (1.40 to 1.60) at depth 1, 1.00 (0.90 to 1.10) at depth 4. "
        "Memory-mapped: 1.00 (0.90 to 1.10) cold, 0.50 (0.40 to 0.60) warm. "
        "In brackets: 95 % intervals.",
    )


def test_what_a_deeper_queue_gives_without_a_pack_is_no_gain_of_packing() -> None:
    gains = [gain(1, "gain"), gain(4, "none"), gain(16, "gain"), *RAW]
    done = shards_read_in({1: 2, 4: 1, 16: 1.5})
    is_gain, said = verdict(gains, done, "uring", was_cold=True)
    assert is_gain is False
    assert said.startswith(f"{NO_GAIN}: at depth 4, ")
    assert "1.50 (1.40 to 1.60) at depth 1, 1.50 (1.40 to 1.60) at depth 16" in said


@pytest.mark.parametrize("word", ["none", "loss"])
def test_all_but_a_gain_has_one_headline(word: str) -> None:
    is_gain, said = verdict([gain(4, word), *RAW], shards_read_in({4: 1}), "uring", was_cold=None)
    assert is_gain is False
    assert said.startswith(f"{NO_GAIN}: at depth 4, ")


def test_a_verdict_that_cannot_be_says_why() -> None:
    is_gain, said = verdict([], [], "uring", was_cold=True)
    assert is_gain is None
    assert "--source" in said
    few = [Gain("reader", "cold", 4, None, None, None, 2, "unproven")]
    is_gain, said = verdict(few, rounds_of(1, 1), "uring", was_cold=True)
    assert is_gain is None
    assert said == "No verdict: it takes 9 rounds, and there was time for 2. Give more --seconds."
    crowded = [one._replace(disturbance=Disturbance(0.5, None)) for one in rounds_of(1, 1, 1)]
    is_gain, said = verdict(few, [*crowded, *rounds_of(1, 1)], "uring", was_cold=True)
    assert is_gain is None
    crowd = "in 3 of 5 rounds other processes used the drive or the CPUs; 2 are left"
    assert f"No verdict: {crowd}, and 9 are needed." in said


@pytest.mark.parametrize("was_cold", [False, None])
def test_what_may_be_memory_is_no_gain_of_a_drive(was_cold: bool | None) -> None:
    gains = [gain(4, "gain"), *RAW, *MAPPED]
    done = shards_read_in({4: 1})
    is_gain, said = verdict(gains, done, "buffered", was_cold)
    assert is_gain is None
    assert said == "No verdict: what was read may have come out of the page cache."
    assert verdict(gains, done, "direct", was_cold)[0] is True
    assert verdict(gains, done, "buffered", was_cold=True)[0] is True
