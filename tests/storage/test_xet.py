"""Files of the hub that lie in Xet: hf_xet itself reads them, from a store on this disk."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moepack.common.errors import SourceError
from moepack.common.paths import RemotePath
from moepack.packing.pack_model import pack_model
from moepack.storage.input_file import open_input
from moepack.storage.remote import stores, xet
from moepack.storage.remote.store import RemoteError, RemoteStamp
from moepack.storage.remote.stores import resolve, streams_of
from moepack.storage.remote.xet import XetFiles
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import contents, shards_of
from tests.support.remote_servers import FakeHub, file_server

hf_xet = pytest.importorskip("hf_xet", reason="hf_xet is not installed")

MODEL = "qwen3moe"
DATA = random.Random(6).randbytes(3_000_000)

pytestmark = pytest.mark.long


def store_in_xet(hub: FakeHub, store: Path) -> None:
    """Store all files of the hub's one repository in Xet too."""
    hub.xet_store = f"local://{store}"
    folder = hub.folder / REPOSITORY
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    with hf_xet.XetSession().new_upload_commit(endpoint=hub.xet_store) as commit:
        uploads = {name: commit.start_upload_file(str(folder / name)) for name in names}
    hub.xet_hashes = {name: upload.result().xet_info.hash for name, upload in uploads.items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    (tmp_path / "file.gguf").write_bytes(DATA)
    files = [*map(Path, shards_of(MODEL)), tmp_path / "file.gguf"]
    with hub_of(tmp_path / "hub", monkeypatch, files) as server:
        store_in_xet(server, tmp_path / "xet")
        yield server


@pytest.fixture
def path(hub: FakeHub) -> RemotePath:
    return resolve(f"hf://{REPOSITORY}/file.gguf")


def test_ranges_come_to_many_threads_at_once(hub: FakeHub, path: RemotePath) -> None:
    file = open_input(path)
    with ThreadPoolExecutor(8) as threads:
        offsets = range(0, len(DATA), 100_000)
        pieces = threads.map(lambda offset: b"".join(file.stream(offset, 100_000)), offsets)
        assert b"".join(pieces) == DATA
    buffer = memoryview(bytearray(10))
    assert file.read_into(5, buffer) == 10
    assert buffer == DATA[5:15]
    assert not hub.content.traffic.requests


def test_a_model_in_xet_becomes_the_same_pack(hub: FakeHub, tmp_path: Path) -> None:
    hub.private.add(REPOSITORY)
    hub.tokens.add("hf_secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        pack_model(f"hf://{REPOSITORY}/{Path(shards_of(MODEL)[0]).name}", tmp_path / "pack")
    pack_model(shards_of(MODEL), tmp_path / "local")
    pack, local = contents(tmp_path / "pack"), contents(tmp_path / "local")
    assert {name for name in local if pack[name] != local[name]} <= {"manifest.json"}
    assert not hub.content.traffic.requests
    asked = [path for _, path, _ in hub.traffic.requests]
    assert sum("xet-read-token" in path for path in asked) == 1, "one for all ranges"


@pytest.mark.parametrize("reason", ["not in Xet", "switched off"])
def test_the_plain_way_is_taken_for_all_others(
    reason: str, hub: FakeHub, path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "switched off":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    else:
        del hub.xet_hashes["file.gguf"]
    assert b"".join(open_input(path).stream(3, 1000)) == DATA[3:1003]
    assert hub.content.traffic.gets()


def test_a_stream_that_ends_early_is_never_taken_for_whole(hub: FakeHub, path: RemotePath) -> None:
    files = streams_of(path, RemoteStamp(len(DATA), None, "stated"))
    longer = RemoteStamp(len(DATA) + 10, None, "stated")
    with pytest.raises(RemoteError, match=f"the stream ended at byte {len(DATA):,}"):
        list(files.stream(path.key, len(DATA) - 5, 10, longer))
    hub.xet_hashes["file.gguf"] = "0" * 64
    stores.forget_stores()
    with pytest.raises(RemoteError, match="the stream ended at byte 0"):
        list(open_input(path).stream(0, 10))


def test_a_failed_range_leaves_the_others_alone(hub: FakeHub, path: RemotePath) -> None:
    stamp = RemoteStamp(len(DATA), None, "stated")
    files = streams_of(path, stamp)
    with pytest.raises(RemoteError, match="at or beyond the file size"):
        list(files.stream(path.key, len(DATA) + 5, 10, stamp))
    assert b"".join(files.stream(path.key, 0, 100, stamp)) == DATA[:100]


def test_a_server_that_refuses_for_a_while_is_waited_for(
    hub: FakeHub, path: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    xet._session.cache_clear()
    tokens = {"accessToken": "for Xet", "exp": 1 << 33, "casUrl": hub.xet_store}
    (tmp_path / "tokens").write_text(json.dumps(tokens))
    with file_server(tmp_path) as server:
        files = XetFiles(hub.xet_hashes, f"{server.url}/tokens", {})
        stamp = RemoteStamp(len(DATA))
        server.fault = lambda number: "status" if number < 7 else None
        assert b"".join(files.stream(path.key, 0, 10, stamp)) == DATA[:10]
        server.fault = lambda number: "status"
        other = XetFiles(hub.xet_hashes, f"{server.url}/tokens", {})
        with pytest.raises(RemoteError, match="503 Service Unavailable"):
            list(other.stream(path.key, 0, 10, stamp))
    xet._session.cache_clear()


@pytest.mark.parametrize("reason", ["not installed", "switched off"])
def test_a_file_above_400_gb_says_what_it_needs(
    reason: str, hub: FakeHub, path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "not installed":
        monkeypatch.setitem(__import__("sys").modules, "hf_xet", None)
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    streams_of(path, RemoteStamp(400 * 10**9, None, "stated"))
    with pytest.raises(SourceError, match="which only hf_xet can read") as refusal:
        streams_of(path, RemoteStamp(401 * 10**9, None, "stated"))
    expected = "hf_xet" if reason == "not installed" else "HF_HUB_DISABLE_XET"
    assert expected in str(refusal.value.hint)
