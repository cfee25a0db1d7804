"""Learned counts are few, age, tell nothing of a single token, and show any damage."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.traces.hotness import file, measure
from moepack.traces.hotness.learned import (
    LEAST_TOKENS,
    MOST_WINDOWS,
    Learned,
    LearnedWindow,
    decode,
    encode,
)
from tests.support.shapes import shape_of_counts

COUNTS = {1: 4, 3: 2}
KEYS = [ExpertKey(layer, expert) for layer, count in COUNTS.items() for expert in range(count)]
SHAPE = shape_of_counts(COUNTS)
PATH = "model.csv"


def window(token_count: int, day: int = 20_000, seed: int = 0) -> LearnedWindow:
    draw = random.Random(seed)
    counts = Counter({key: draw.randint(1, 9) for key in draw.sample(KEYS, 5)})
    return LearnedWindow(day, token_count, 3 * token_count, token_count, counts)


def learned(*token_counts: int) -> Learned:
    one = Learned(COUNTS)
    one.add(window(count, 20_000 + day, day) for day, count in enumerate(token_counts))
    return one


def test_what_was_written_is_read() -> None:
    one = learned(40, 50, 60)
    again = decode(encode(one), SHAPE, PATH)
    assert again.windows == one.windows
    assert again.token_count == 150
    assert again.hit_rate == 1 / 3
    assert decode(encode(Learned(COUNTS)), SHAPE, PATH).hit_rate is None


def test_the_file_is_a_hotness_file(tmp_path: Path) -> None:
    one, path = learned(40, 50, 60), tmp_path / PATH
    path.write_bytes(encode(one))
    hotness = measure.load(str(path))
    assert (hotness.counts, hotness.token_count) == (one.counts, 150)
    hotness.check_fits(SHAPE)


def test_each_flipped_bit_of_each_byte_and_each_cut_is_noticed() -> None:
    data = encode(learned(40, 50))
    broken = [data[:end] for end in range(len(data))] + [data + b"\0", data * 2]
    for at in range(len(data)):
        for bit in (1, 0x80):
            broken.append(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
    for one in broken:
        with pytest.raises(TraceError, match="learned counts that are damaged"):
            decode(one, SHAPE, PATH)


def test_what_is_of_another_model_is_refused() -> None:
    data = encode(learned(40, 50))
    for counts in ({1: 4, 2: 2}, {1: 2, 3: 4}, {1: 4, 3: 3}):
        with pytest.raises(TraceError, match="counted on another model"):
            decode(data, shape_of_counts(counts), PATH)


@given(st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 40)), max_size=60))
def test_windows_are_few_and_none_but_the_last_is_of_few_tokens(token_counts: list[int]) -> None:
    one = learned(*token_counts)
    assert len(one.windows) <= MOST_WINDOWS
    assert all(window.token_count >= LEAST_TOKENS for window in one.windows[:-1])
    before = one.token_count
    one.end()
    assert one.token_count == before
    assert len(one.windows) <= 1 or one.windows[-1].token_count >= LEAST_TOKENS
    if sum(token_counts) <= 4000:
        assert before == sum(token_counts)
        expected: Counter[ExpertKey] = Counter()
        for day in range(len(token_counts)):
            expected += window(1, seed=day).counts
        assert one.counts == expected


def test_old_counts_go_when_new_ones_come() -> None:
    one = learned(*[1000] * 100)
    assert 20_000 < one.token_count < 8 * 4096 + 1000
    assert one.windows[0].day > 20_060
    assert [window.day for window in one.windows] == sorted(window.day for window in one.windows)


def test_halves_are_cut_near_the_middle() -> None:
    assert learned(100).halves() is None, "of one window"
    assert learned(100).to_hotness(PATH).held_out is None
    halves = learned(100, 40, 40, 40, 40).halves()
    assert halves is not None
    assert [half.token_count for half in halves] == [140, 120]


def test_as_hotness_it_has_a_later_half_and_is_refused_for_other_models(tmp_path: Path) -> None:
    hotness = learned(40, 60).to_hotness(PATH)
    assert hotness.held_out == ("time", 60, window(1, seed=1).counts)
    file.save(hotness, tmp_path / "hot.csv")
    again = measure.load(str(tmp_path / "hot.csv"))
    assert (again.counts, again.token_count, again.digest) == (hotness.counts, 100, hotness.digest)
    again.check_fits(SHAPE)
    with pytest.raises(TraceError, match="counted on another model"):
        again.check_fits(shape_of_counts({1: 8, 3: 2}))


def test_the_hottest_come_first_and_those_that_were_never_chosen_not_at_all() -> None:
    counts = Counter({KEYS[5]: 3, KEYS[1]: 3, KEYS[2]: 9, KEYS[4]: 4})
    one = Learned(COUNTS, [LearnedWindow(1, 40, 0, 0, counts)])
    assert one.hottest_first() == [KEYS[2], KEYS[4], KEYS[1], KEYS[5]]
    with pytest.raises(TraceError, match="nothing was counted yet"):
        Learned(COUNTS).to_hotness(PATH)
