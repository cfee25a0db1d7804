"""Models that are elsewhere are fetched into the user's cache once, and found there again."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, SourceError
from moepack.packing.fetched import FetchPlan
from moepack.storage.remote.stores import forget_stores
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.interruptions import StopHereError
from tests.support.machine_faults import Room
from tests.support.models import first_shard, shards_of
from tests.support.pulls import copy_pack, is_same, store_of_packs
from tests.support.remote_servers import FakeHub, FileServer

pytestmark = pytest.mark.long

MODEL = "qwen3moe"
NAME = "qwen3moe-Q4_K_M-ntfs-t6"
ADDRESS = f"hf://{REPOSITORY}/UD-Q4_K_XL"
COMMIT = FakeHub.commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moepack" / "models"


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_of(tmp_path / "hub", monkeypatch, shards_of(MODEL), "UD-Q4_K_XL") as server:
        yield server


@pytest.fixture
def local(packs: dict[str, Path]) -> Path:
    """Return the pack of the same shards where they lie on the disk."""
    return packs[MODEL]


@pytest.fixture
def disconnect(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that takes the hub away."""
    constants = pytest.importorskip("huggingface_hub.constants")

    def leave() -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        forget_stores()

    return leave


def test_a_model_of_the_hub_becomes_a_pack_once(hub: FakeHub, cache: Path, local: Path) -> None:
    plans: list[FetchPlan] = []
    done: list[tuple[int, int]] = []
    path = moepack.fetch_model(
        ADDRESS, planned=plans.append, progress=lambda *both: done.append(both)
    )
    assert path == cache / "hf" / REPOSITORY / COMMIT[:12] / "UD-Q4_K_XL" / f"{NAME}.moepack"
    assert (path / "dense.bin").read_bytes() == (local / "dense.bin").read_bytes()
    assert moepack.verify(path, shards_of(MODEL)).passed
    (plan,) = plans
    assert plan.path == str(path)
    assert plan.address.startswith(f"hf://{REPOSITORY}@{COMMIT}/")
    assert 0 < sum(length for length, _ in done) <= plan.length
    sent = hub.content.traffic.sent_length
    again = f"hf://{REPOSITORY}/UD-Q4_K_XL/{NAME}-00003-of-00006.gguf"
    for address in (ADDRESS, f"hf://{REPOSITORY}", again):
        assert moepack.fetch_model(address, planned=plans.append) == path
    assert len(plans) == 1
    assert hub.content.traffic.sent_length == sent


@pytest.mark.parametrize(
    "inner", [f"@{COMMIT}/UD-Q4_K_XL", f"/ud-q4_k_xl@{COMMIT}", f"@{COMMIT}/", f"/Q4_K_XL@{COMMIT}"]
)
def test_at_a_commit_nothing_is_asked_of_the_network_again(
    inner: str, hub: FakeHub, cache: Path, disconnect: Callable[[], None]
) -> None:
    path = moepack.fetch_model(ADDRESS)
    disconnect()
    notices: list[str] = []
    assert moepack.fetch_model(f"hf://{REPOSITORY}{inner}", notice=notices.append) == path
    assert not notices, "nobody was asked"


def test_without_a_network_the_model_that_is_here_is_used_and_that_is_said(
    hub: FakeHub, cache: Path, disconnect: Callable[[], None]
) -> None:
    notices: list[str] = []
    path = moepack.fetch_model(ADDRESS)
    assert isinstance(path, Path)
    disconnect()
    assert moepack.fetch_model(ADDRESS, notice=notices.append) == path
    (notice,) = notices
    assert notice.startswith("the hub cannot be reached")
    assert str(path) in notice
    others = (f"hf://{REPOSITORY}/Q8_0", "hf://someone/B-model/UD-Q4_K_XL", f"{ADDRESS}@{'f' * 40}")
    for other in others:
        with pytest.raises(MachineError, match="the hub cannot be reached"):
            moepack.fetch_model(other)
    (path / "manifest.json").unlink()
    with pytest.raises(MachineError, match="the hub cannot be reached"):
        moepack.fetch_model(ADDRESS)


def test_what_was_interrupted_goes_on(
    hub: FakeHub, cache: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(length: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        moepack.fetch_model(ADDRESS, progress=stop)
    assert stopped.value.__notes__ == ["run the same command again: it goes on from what is there"]
    hub.content.fault = lambda number: "status" if number > 30 else None
    hub.content.status = 404
    with pytest.raises(SourceError) as refusal:
        moepack.fetch_model(ADDRESS)
    assert refusal.value.hint == "run the same command again: it goes on from what is there"
    hub.content.fault = lambda number: None
    path = moepack.fetch_model(ADDRESS)
    assert isinstance(path, Path)
    assert moepack.verify(path, shards_of(MODEL)).passed


def test_a_cache_without_space_says_what_to_do(
    hub: FakeHub, tmp_path: Path, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    small = room.mount(tmp_path / "small", "-t", "tmpfs", "-o", "size=600k", "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(small))
    with pytest.raises(MachineError, match="not enough space") as refusal:
        moepack.fetch_model(ADDRESS)
    assert "a folder on another drive in XDG_CACHE_HOME" in str(refusal.value.hint)


def test_shards_in_the_cache_of_the_hub_are_used_as_they_lie(
    hub: FakeHub, cache: Path, tmp_path: Path, disconnect: Callable[[], None]
) -> None:
    folder = tmp_path / "hub cache" / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT / "UD-Q4_K_XL"
    shutil.copytree(hub.folder / REPOSITORY / "UD-Q4_K_XL", snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    shards = [snapshot / Path(shard).name for shard in shards_of(MODEL)]
    assert moepack.fetch_model(ADDRESS) == shards
    disconnect()
    assert moepack.fetch_model(ADDRESS) == shards
    assert moepack.fetch_model(f"{ADDRESS}@{COMMIT}") == shards
    assert not list(cache.rglob("*.moepack"))
    shards[2].unlink()
    with pytest.raises(MachineError, match="cannot be reached"):
        moepack.fetch_model(ADDRESS)


def test_what_is_here_is_returned_as_it_is(tmp_path: Path) -> None:
    for model in (tmp_path, str(tmp_path), [tmp_path / "a", tmp_path / "b"]):
        assert moepack.fetch_model(model) == model


# Stores


@pytest.fixture
def server(
    cache: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FileServer]:
    (tmp_path / "store").mkdir()
    copy_pack(local, tmp_path / "store")
    with store_of_packs(tmp_path / "store", monkeypatch) as one:
        yield one


def test_a_pack_in_a_store_is_pulled_and_found_again(
    server: FileServer, cache: Path, local: Path, tmp_path: Path
) -> None:
    address = f"{server.url}/a.moepack"
    notices: list[str] = []
    lengths: list[int] = []

    def stop(length: int, total: int) -> None:
        lengths.append(length)
        if sum(lengths) > total / 2:
            raise StopHereError

    with pytest.raises(StopHereError):
        moepack.fetch_model(address, progress=stop)
    path = moepack.fetch_model(address)
    assert isinstance(path, Path)
    assert cache in path.parents
    assert path.name == "a.moepack"
    assert is_same(path, local)
    assert moepack.fetch_model(address) == path
    server.fault, server.status = lambda number: "status", 403
    assert moepack.fetch_model(address, notice=notices.append) == path
    assert len(notices) == 1
    server.fault = lambda number: None
    shutil.rmtree(server.folder / "a.moepack")
    moepack.pack_model(first_shard("granite"), server.folder / "a.moepack")
    plans: list[FetchPlan] = []
    other = moepack.fetch_model(address, planned=plans.append, notice=notices.append)
    assert isinstance(other, Path)
    assert other != path
    assert is_same(other, server.folder / "a.moepack")
    assert plans[0].cache == str(cache)
    assert plans[0].cache_length >= sum(one.stat().st_size for one in local.iterdir())
    assert not path.exists(), "an older version"
    assert notices[1].startswith("an older version was removed")


@pytest.mark.parametrize("reason", ["named by its commit", "open"])
def test_an_older_version_that_somebody_wants_stays(
    reason: str, hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_pinned = reason == "named by its commit"
    path = moepack.fetch_model(f"{ADDRESS}@{COMMIT}" if is_pinned else ADDRESS)
    assert isinstance(path, Path)
    monkeypatch.setattr(hub, "commit", "f" * 40)
    forget_stores()
    with moepack.Pack(path) as pack, pack.reader() as reader:
        if not is_pinned:
            reader.read(0, 0)
        assert moepack.fetch_model(ADDRESS) != path
    assert (path / "manifest.json").exists()


def test_a_gguf_on_a_web_server_becomes_a_pack_of_its_version(
    server: FileServer, cache: Path
) -> None:
    for shard in shards_of(MODEL):
        shutil.copy(shard, server.folder)
    address = f"{server.url}/{NAME}-00002-of-00006.gguf"
    path = moepack.fetch_model(address)
    assert isinstance(path, Path)
    assert path.name == f"{NAME}.moepack"
    assert moepack.verify(path, shards_of(MODEL)).passed
    assert moepack.fetch_model(address) == path
    (server.folder / f"{NAME}-00004-of-00006.gguf").touch()
    assert moepack.fetch_model(address) != path


@pytest.mark.parametrize("address", ["{}/x/../a.moepack", "hf://a/b/../c", "hf://a/b/..@main"])
def test_no_name_leads_out_of_the_cache(address: str, server: FileServer, cache: Path) -> None:
    with pytest.raises(SourceError, match="address"):
        moepack.fetch_model(address.format(server.url))
    assert not cache.exists()
