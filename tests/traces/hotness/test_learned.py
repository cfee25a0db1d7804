"""Learned counts are few, age, tell nothing of a single token, and show any damage."""

import os
import random
import stat
from collections import Counter
from multiprocessing.dummy import Pool
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from moepack.common.errors import MachineError, TraceError
from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from moepack.storage.folders import lock
from moepack.traces.hotness import file, measure
from moepack.traces.hotness.learned import (
    LEAST_TOKENS,
    MOST_WINDOWS,
    Learned,
    LearnedStore,
    LearnedWindow,
    decode,
    encode,
)
from tests.support.models import first_shard
from tests.support.shapes import shape_of_counts

COUNTS = {1: 4, 3: 2}
KEYS = [ExpertKey(layer, expert) for layer, count in COUNTS.items() for expert in range(count)]
SHAPE = shape_of_counts(COUNTS)
PATH = "model.csv"


def window(token_count: int, day: int = 20_000, seed: int = 0) -> LearnedWindow:
    draw = random.Random(seed)
    counts = Counter({key: draw.randint(1, 9) for key in draw.sample(KEYS, 5)})
    return LearnedWindow(day, token_count, counts)


def learned(*token_counts: int) -> Learned:
    one = Learned(COUNTS)
    one.add(window(count, 20_000 + day, day) for day, count in enumerate(token_counts))
    return one


def test_what_was_written_is_read() -> None:
    one = learned(40, 50, 60)
    again = decode(encode(one), SHAPE, PATH)
    assert again.windows == one.windows
    assert again.token_count == 150


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
    one = Learned(COUNTS, [LearnedWindow(1, 40, counts)])
    assert list(one.shares()) == [KEYS[2], KEYS[4], KEYS[1], KEYS[5]]
    with pytest.raises(TraceError, match="nothing was counted yet"):
        Learned(COUNTS).to_hotness(PATH)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def store(state: Path, pack: moepack.Pack) -> LearnedStore:
    return LearnedStore(pack)


def windows(store: LearnedStore, *token_counts: int) -> list[LearnedWindow]:
    counts = Counter(
        {ExpertKey(layer, expert): expert + 1 for layer in (0, 1) for expert in (2, 5)}
    )
    return [LearnedWindow(20_000, count, counts) for count in token_counts]


def test_what_is_added_is_read_and_nobody_else_reads_it(store: LearnedStore, state: Path) -> None:
    assert store.read().token_count == 0
    assert store.add(windows(store, 40, 50))
    assert store.add(windows(store, 60))
    assert [window.token_count for window in store.read().windows] == [40, 50, 60]
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert store.path.parent == state / "moepack" / "learned"
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    assert os.listdir(store.path.parent) == [store.path.name], "nothing else is left"


def test_a_model_is_the_same_in_its_shards_and_in_a_pack(store: LearnedStore) -> None:
    with open_model(first_shard("qwen3moe")) as shards, open_model(first_shard("mixtral")) as other:
        assert LearnedStore(shards).path == store.path
        assert LearnedStore(other).path != store.path


def test_of_too_few_tokens_nothing_is_written(store: LearnedStore) -> None:
    assert not store.add(windows(store, 31))
    assert not store.path.exists()
    assert store.add(windows(store, 40))
    assert store.add(windows(store, 5))
    assert [window.token_count for window in store.read().windows] == [45]


def test_runs_that_write_at_once_lose_nothing(store: LearnedStore) -> None:
    with Pool(4) as pool:
        assert all(pool.map(lambda count: store.add(windows(store, count), 60), [50] * 24))
    learned = store.read()
    assert learned.token_count == 24 * 50
    once = windows(store, 50)[0].counts
    assert learned.counts == {key: 24 * count for key, count in once.items()}


def test_while_another_process_writes_nothing_is_added(store: LearnedStore) -> None:
    descriptor = os.open(store.path.parent, os.O_RDONLY)
    lock(descriptor, store.path.parent)
    assert not store.add(windows(store, 50), seconds=0.1)
    os.close(descriptor)
    assert store.add(windows(store, 50))


def test_a_damaged_file_is_said_and_begun_anew(store: LearnedStore) -> None:
    store.add(windows(store, 40, 50))
    store.path.write_bytes(store.path.read_bytes()[:-1])
    with pytest.raises(TraceError, match=r"\.csv: learned counts that are damaged"):
        store.read()
    assert store.add(windows(store, 60))
    assert store.read().token_count == 60


def test_what_a_killed_run_left_is_in_nobodys_way(store: LearnedStore) -> None:
    store.add(windows(store, 40))
    partial = store.path.with_suffix(".csv.partial")
    partial.write_bytes(b"half")
    assert store.add(windows(store, 50))
    assert store.read().token_count == 90
    assert not partial.exists()


def test_a_file_longer_than_any_can_be_is_not_read_to_its_end(store: LearnedStore) -> None:
    with open(store.path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TraceError, match="damaged"):
        store.read()


def test_a_link_in_the_place_of_the_file_is_neither_followed_nor_written_through(
    store: LearnedStore, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    store.path.symlink_to(tmp_path / "precious")
    with pytest.raises(MachineError):
        store.read()
    with pytest.raises(MachineError):
        store.add(windows(store, 50))
    assert (tmp_path / "precious").read_text() == "precious"


def test_it_is_forgotten_once(store: LearnedStore) -> None:
    assert not store.forget()
    store.add(windows(store, 40))
    store.path.with_suffix(".csv.partial").touch()
    assert store.forget()
    assert not os.listdir(store.path.parent)
    assert not store.forget()


def test_without_a_folder_that_is_the_users_alone_nothing_is_kept(
    state: Path, pack: moepack.Pack
) -> None:
    (state / "moepack").mkdir(parents=True)
    (state / "moepack").chmod(0o777)
    with pytest.raises(MachineError, match="no folder") as refusal:
        LearnedStore(pack)
    assert "XDG_STATE_HOME" in (refusal.value.hint or "")


def test_a_relative_path_is_no_folder(
    pack: moepack.Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification of XDG says so."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert LearnedStore(pack).path.is_relative_to(tmp_path / ".local" / "state" / "moepack")
    assert not (tmp_path / "state").exists()
