"""`moepack models` lists what lies on this machine, and removes only what moepack wrote."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.shape import ExpertKey
from moepack.running.serving.prompt_cache import model_id
from moepack.running.serving.prompt_files import model_folder
from moepack.traces.hotness.learned import LearnedStore, LearnedWindow
from tests.support.children import MOEPACK
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import flip, shards_of, tree
from tests.support.terminals import Terminal
from tests.support.warm_command import Run

ADDRESS = f"hf://{REPOSITORY}/UD-Q4_K_XL"
NAME = f"{ADDRESS}/qwen3moe-Q4_K_M-ntfs-t6"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of this test's own, with the folders of moepack and of the hub in it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    folders = {"XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state", "HF_HUB_CACHE": "hub cache"}
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
    return tmp_path


@pytest.fixture
def fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the pack of a model that was fetched, with a mirror and counts."""
    (home / "other drive").mkdir()
    with hub_of(home / "hub", monkeypatch, shards_of("qwen3moe"), "UD-Q4_K_XL"):
        path = moepack.fetch_model(ADDRESS)
        assert isinstance(path, Path)
        moepack.mirror_pack(path, home / "other drive")
        learn(path)
        keep_prompt(path)
        yield path


def keep_prompt(path: Path) -> Path:
    """Write a file with the name of a text's state, as for a server of this model."""
    with moepack.open(path) as pack:
        folder = model_folder(model_id(pack))
    assert folder is not None
    state = folder / "00000000-0.state"
    state.write_bytes(bytes(5000))
    return state


def learn(path: Path) -> Path:
    with moepack.open(path) as pack:
        store = LearnedStore(pack)
        counts = Counter({ExpertKey(min(store.new().expert_counts), 0): 40})
        assert store.add([LearnedWindow(1, 40, counts)])
        return store.path


def listed(cli: Run) -> dict[str, dict[str, Any]]:
    answer = json.loads(cli("models", "--json").stdout)
    return {item["kind"]: item for item in answer["items"]}


def test_a_fetched_model_is_listed_with_all_that_is_kept_of_it(
    fetched: Path, home: Path, cli: Run
) -> None:
    answer = json.loads(cli("models", "--json").stdout)
    items = {item["kind"]: item for item in answer["items"]}
    names = {kind: item["name"] for kind, item in items.items()}
    assert names == dict.fromkeys(("model", "learned", "mirror", "prompts"), NAME)
    assert items["model"]["path"] == str(fetched)
    assert items["model"]["version"] == fetched.parent.parent.name
    assert 1 << 20 < items["model"]["length"] < 1 << 24
    assert items["mirror"]["path"] == str(home / "other drive" / f"{fetched.name}.mirror")
    assert all(item["last_used"] and item["problem"] is None for item in items.values())
    assert answer["length"] == sum(item["length"] for item in items.values())
    assert NAME in cli("models").stdout


@pytest.mark.parametrize("name", [NAME, ADDRESS, f"{REPOSITORY}:UD-Q4_K_XL", "its path"])
def test_a_model_goes_with_all_that_is_kept_of_it(
    name: str, fetched: Path, home: Path, cli: Run
) -> None:
    run = cli("models", "rm", str(fetched) if name == "its path" else name, "--yes")
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("removed, 4 items\n")
    assert not listed(cli)
    assert not any((home / "other drive").iterdir())
    assert not any((home / "cache" / "moepack" / "models").iterdir()), "no empty folder is left"


def test_only_some_of_it_goes(fetched: Path, cli: Run) -> None:
    assert cli("models", "rm", NAME, "--only", "learned,mirror", "--yes").returncode == 0
    assert listed(cli).keys() == {"model", "prompts"}
    assert cli("models", "rm", "--only", "prompts", "--yes").returncode == 0
    assert listed(cli).keys() == {"model"}
    assert cli("models", "rm", "--yes").returncode == 2
    assert moepack.verify(fetched).passed
    wrong = cli("models", "rm", NAME, "--only", "learnt", "--yes")
    assert wrong.returncode == 2
    assert "learnt" in wrong.stderr
    nothing = cli("models", "rm", NAME, "--only", "index", "--yes")
    assert (nothing.returncode, "nothing is stored of it" in nothing.stderr) == (2, True)


def test_nothing_goes_unasked(fetched: Path, cli: Run) -> None:
    run = cli("models", "rm", NAME)
    assert run.returncode == 2
    assert "--yes" in run.stderr
    with Terminal(*MOEPACK, "models", "rm", NAME) as terminal:
        terminal.until("will be removed")
        terminal.until("Type delete")
        terminal.type("no\r")
        assert "nothing was touched" in terminal.until_end()
    assert listed(cli).keys() == {"model", "mirror", "learned", "prompts"}
    with Terminal(*MOEPACK, "models", "rm", NAME) as terminal:
        terminal.until("Type delete")
        terminal.type("delete\r")
        assert "removed, 4 items" in terminal.until_end()
    assert not listed(cli)


def test_a_model_that_is_open_stays(fetched: Path, cli: Run) -> None:
    with moepack.open(fetched) as pack, pack.reader():
        run = cli("models", "rm", NAME, "--yes")
        assert run.returncode == 2
        assert "in use" in run.stderr
    assert listed(cli).keys() == {"model", "mirror", "learned", "prompts"}


def test_of_the_users_own_model_only_what_moepack_wrote_goes(
    home: Path, packs: dict[str, Path], cli: Run
) -> None:
    own = Path(shutil.copytree(packs["qwen3moe"], home / "own.moepack"))
    counts, state = learn(own), keep_prompt(own)
    assert listed(cli)["learned"]["name"] == "qwen3moe-Q4_K_M-ntfs-t6"
    before = tree(own)
    assert cli("models", "rm", own, "--yes").returncode == 0
    assert not counts.exists()
    assert not state.exists()
    assert tree(own) == before
    again = cli("models", "rm", own, "--yes")
    assert again.returncode == 2
    assert "nothing is stored of it" in again.stderr
    assert tree(own) == before


def test_damaged_files_are_named_and_those_of_another_origin_stay(
    fetched: Path, home: Path, cli: Run
) -> None:
    cache, state = home / "cache" / "moepack", home / "state" / "moepack"
    foreign = [
        *(cache / "notes.txt", cache / "models" / "mine.gguf", cache / "models" / "a.moepack"),
        *(state / "learned" / "mine.csv", cache / "index-of-mine.bin"),
    ]
    (counts,) = (state / "learned").iterdir()
    for path in foreign:
        path.write_bytes(b"mine")
    flip(fetched / "manifest.json", 9)
    flip(counts, 70)
    index = cache / f"index-{1:016x}.bin"
    index.write_bytes(bytes(5000))
    answer = json.loads(cli("models", "--json").stdout)
    assert not {item["path"] for item in answer["items"]} & set(map(str, foreign))
    problems = {item["kind"]: item["problem"] for item in answer["items"]}
    assert problems["model"]
    assert problems["learned"]
    assert problems["index"] is None
    assert cli("models", "rm", NAME, index, "--yes").returncode == 0
    assert not index.exists()
    assert not fetched.exists()
    assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)
    assert cli("models", "rm", foreign[0], "--yes").returncode != 0
    assert foreign[0].exists()


def test_what_the_hubs_client_keeps_is_listed_and_not_removed(home: Path, cli: Run) -> None:
    snapshot = home / "hub cache" / "models--someone--A-model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    blob = Path(shutil.copy(shards_of("qwen3moe")[0], snapshot.parent.parent / "blobs" / "1"))
    os.symlink("../../blobs/1", snapshot / "model.gguf")
    item = listed(cli)["hub"]
    assert item["name"] == f"hf://{REPOSITORY}"
    assert item["length"] == blob.stat().st_blocks * 512
    run = cli("models", "rm", f"hf://{REPOSITORY}", "--yes")
    assert run.returncode == 2
    assert f"hint: hf cache rm model/{REPOSITORY}" in run.stderr
    assert blob.exists()


def test_where_nothing_is_that_is_said(home: Path, cli: Run) -> None:
    assert "nothing" in cli("models").stdout
    assert json.loads(cli("models", "--json").stdout) == {"items": [], "length": 0}
