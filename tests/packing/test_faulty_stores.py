"""Packs written into a store through a network that fails, by processes that are killed."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import RemotePath
from moepack.packing.pack_model import SharedPack, pack_model
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.store import RemoteError
from moepack.storage.remote.stores import store_of
from tests.support.buckets import faulty_bucket, objects
from tests.support.gguf_builder import moe
from tests.support.models import contents, keys_of
from tests.support.remote_servers import FaultyStore, StoreFault, faults_by_chance

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small model."""
    return moe((0,), 8).write(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, bytes]:
    """Return the files of the pack that one process makes."""
    pack_model(model, model.parent / "pack")
    return contents(model.parent / "pack")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FaultyStore]]:
    with faulty_bucket() as pair:
        yield pair


@pytest.fixture
def bucket(server: tuple[str, FaultyStore]) -> str:
    return server[0]


@pytest.fixture
def network(
    server: tuple[str, FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyStore]:
    monkeypatch.setattr(remote_store, "PAUSES", (0.01,) * 5)
    monkeypatch.setattr(remote_store, "UPLOAD_LENGTH", 5 << 20)
    network = server[1]
    network.traffic.requests.clear()
    network.faults.clear()
    yield network
    network.fault, network.status = lambda method, path: None, 503


def stored(network: FaultyStore, address: str) -> dict[str, bytes]:
    """Read all objects of a folder, through a network that works."""
    network.fault = lambda method, path: None
    return objects(address)


def test_a_network_that_fails_all_the_time_changes_no_byte(
    model: Path, alone: dict[str, bytes], bucket: str, network: FaultyStore
) -> None:
    """Of a hundred requests 10 are refused, 10 cut, 10 answers cut, 10 lost, and 10 are slow."""
    target = f"{bucket}/chance.moepack"
    network.fault = faults_by_chance(1, 0.1)
    pack_model(model, target)
    with moepack.open(target) as opened, opened.reader() as reader:
        for key in keys_of(opened):
            where = opened.locate(*key)
            data = alone[where.path.name][where.offset :][: where.length]
            assert bytes(reader.read(*key)) == data
    assert network.faults == {"status", "request cut", "cut", "lost", "slow"}
    files = stored(network, target)  # records whose removal failed mean nothing by a manifest
    assert {name: files[name] for name in files if "pack.records/" not in name} == alone


def test_a_commit_whose_answer_is_lost_is_a_commit(
    model: Path, alone: dict[str, bytes], bucket: str, network: FaultyStore
) -> None:
    target = f"{bucket}/lost.moepack"
    lost: list[str] = []

    def fault(method: str, path: str) -> StoreFault:
        name = path.partition("?")[0].rpartition("/")[2]
        if method != "PUT" or name not in ("input.json", "manifest.json") or name in lost:
            return None
        lost.append(name)
        return "lost"

    network.fault = fault
    summary = pack_model(model, target)
    assert lost == ["input.json", "manifest.json"]
    assert summary.written_length
    assert stored(network, target) == alone


@pytest.mark.parametrize(
    ("killed_at", "present", "absent"),
    [
        ("pack.records/dense.bin.json", "dense.bin", "pack.records/dense.bin.json"),
        ("/manifest.json", "index.bin", "manifest.json"),
    ],
    ids=["between a file and its record", "between index and manifest"],
)
def test_a_process_killed_between_two_writes_is_gone_on_with(
    killed_at: str,
    present: str,
    absent: str,
    model: Path,
    alone: dict[str, bytes],
    bucket: str,
    network: FaultyStore,
) -> None:
    target = f"{bucket}/killed-{absent.replace('/', '-')}.moepack"
    command = [sys.executable, "-m", "moepack", "pack", str(model), "-o", target]
    killed: list[int] = []

    def kill(method: str, path: str) -> StoreFault:
        if method == "PUT" and path.partition("?")[0].endswith(killed_at) and not killed:
            killed.append(run.pid)
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            return "status"
        return None

    network.fault = kill
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    assert run.wait(60) == -signal.SIGKILL
    left = stored(network, target)
    assert present in left
    assert absent not in left
    with pytest.raises(RequestError, match="an interrupted pack is here"):
        pack_model(model, target)
    assert pack_model(model, target, resume=True).resumed_file_count
    assert stored(network, target) == alone


def test_uploads_are_whole_or_errors(bucket: str, network: FaultyStore, tmp_path: Path) -> None:
    """A part that is refused, an error inside the last answer, and a last answer that is cut."""
    data = random.Random(4).randbytes(12 << 20)
    (tmp_path / "file").write_bytes(data)
    store = store_of(RemotePath(bucket))
    network.status = 400
    network.fault = lambda method, path: "status" if "partNumber=2" in path else None
    with pytest.raises(RemoteError, match="400"):
        store.upload("upload/file", tmp_path / "file")
    ends: list[str] = []

    def last(fault: StoreFault) -> Callable[[str, str], StoreFault]:
        def step(method: str, path: str) -> StoreFault:
            is_last = method == "POST" and "uploadId" in path
            ends.extend([path] * is_last)
            return fault if is_last and (fault != "cut" or len(ends) == 1) else None

        return step

    network.fault = last("error inside")
    with pytest.raises(RemoteError, match="200 OK with an error inside: InternalError"):
        store.upload("upload/file", tmp_path / "file")
    assert not stored(network, f"{bucket}/upload")
    ends.clear()
    network.fault = last("cut")
    store.upload("upload/file", tmp_path / "file")
    assert len(ends) == 2
    assert stored(network, f"{bucket}/upload") == {"file": data}


def test_what_a_store_has_changed_is_not_committed(
    model: Path, alone: dict[str, bytes], bucket: str, network: FaultyStore
) -> None:
    """What it has is told by ETags; no object is read that is as it was sent."""
    target, name = f"{bucket}/zeroed.moepack", "experts-00000.bin"

    def zero(method: str, path: str) -> StoreFault:
        return "zeroed" if method == "PUT" and path.partition("?")[0].endswith(name) else None

    network.fault = zero
    with pytest.raises(MachineError, match="the store has other bytes than were sent"):
        pack_model(model, target)
    assert "manifest.json" not in stored(network, target)
    pack_model(model, target, resume=True)
    assert stored(network, target) == alone


def test_an_object_that_was_changed_before_the_commit_is_written_anew(
    model: Path, alone: dict[str, bytes], bucket: str, network: FaultyStore
) -> None:
    target = f"{bucket}/changed.moepack"
    shared = SharedPack(model, target)
    shared.write_part((1, 1))
    read = [path for _, path, _ in network.traffic.gets() if ".bin" in path]
    assert all(path.endswith(".json") for path in read)
    changed = RemotePath(target) / "experts-00000.bin"
    data = alone["experts-00000.bin"]
    store_of(changed).put(changed.key, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(RequestError, match=r"not finished, found damaged experts-00000\.bin"):
        shared.commit()
    assert shared.write_part((1, 1)).written_length == len(data)
    shared.commit()
    assert stored(network, target) == alone


def test_a_store_whose_etags_are_no_md5_is_read(
    bucket: str, network: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with keys of its own, and in clouds other than S3."""
    data = random.Random(6).randbytes(12 << 20)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(remote_store, "md5_etag", lambda path: "another")
    network.fault = lambda method, path: "zeroed" if "partNumber=2" in path else None
    with pytest.raises(RemoteError, match="other bytes than were sent"):
        store_of(RemotePath(bucket)).upload("read/file", tmp_path / "file")
    network.fault = lambda method, path: None
    store_of(RemotePath(bucket)).upload("read/file", tmp_path / "file")
    assert stored(network, f"{bucket}/read") == {"file": data}


def test_a_store_that_keeps_refusing_is_given_up_with_a_hint(
    model: Path, bucket: str, network: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "PAUSES", (0.01,))
    network.status = 403

    def refuse(method: str, path: str) -> StoreFault:
        return "status" if method == "PUT" else None

    network.fault = refuse
    with pytest.raises(MachineError, match="cannot write: 403 Forbidden") as failure:
        pack_model(model, f"{bucket}/refused.moepack")
    assert "credentials" in str(failure.value.hint)
    assert "resume=True" in str(failure.value.hint)
