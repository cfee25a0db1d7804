"""The store of learned counts is private, always whole, and open to any number of runs."""

import os
import stat
from collections import Counter
from multiprocessing.dummy import Pool
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, TraceError
from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from moepack.storage.folders import lock
from moepack.traces.hotness.learned import MOST_MODELS, LearnedStore, LearnedWindow
from tests.support.models import first_shard


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
    return [LearnedWindow(20_000, count, 4, 1, counts) for count in token_counts]


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
    with Pool(8) as pool:
        assert all(pool.map(lambda count: store.add(windows(store, count), 60), [50] * 64))
    learned = store.read()
    assert learned.token_count == 64 * 50
    once = windows(store, 50)[0].counts
    assert learned.counts == {key: 64 * count for key, count in once.items()}


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


def test_of_many_models_those_are_forgotten_that_were_used_longest_ago(store: LearnedStore) -> None:
    others = [store.path.with_name(f"{number:032}.csv") for number in range(MOST_MODELS + 3)]
    for number, path in enumerate(others):
        path.touch()
        os.utime(path, (number, number))
    store.add(windows(store, 40))
    assert set(store.path.parent.iterdir()) == {store.path, *others[4:]}


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
