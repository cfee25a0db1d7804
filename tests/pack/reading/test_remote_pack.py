"""Packs in stores: opened by one request, an expert for each further one."""

import filecmp
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.pack.mounting.mount import mount
from moepack.source.shards import open_source
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.stores import forget_stores
from tests.support.models import flip, hotness_of, shards_of
from tests.support.remote_servers import Fault, FileServer, file_server

pytest.importorskip("obstore")


@pytest.fixture
def server(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FileServer]:
    monkeypatch.setattr(remote_store, "PAUSES", (0.0,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(packs["qwen3moe"], tmp_path / "store" / "a.moepack")
    forget_stores()
    with file_server(tmp_path / "store") as one:
        yield one


@pytest.fixture
def address(server: FileServer) -> str:
    return f"{server.url}/a.moepack"


def test_files_in_a_store_are_read_by_its_client_alone(address: str) -> None:
    with moepack.open(address) as pack:
        assert str(pack.path) == address
        assert str(pack.locate(0, 0).path).startswith(f"{address}/experts-")
        with pack.reader() as reader:
            assert (reader.backend, reader.why) == ("remote", "the files are in a store")
        with pytest.raises(MachineError, match="files of this machine"):
            pack.reader(backend="direct")


def test_an_open_pack_costs_one_round_trip_and_an_expert_another(
    server: FileServer, address: str
) -> None:
    with moepack.Pack(address):
        pass
    first = len(server.traffic.requests)
    assert first == 2, "manifest and index"
    with moepack.Pack(address) as pack, pack.reader() as reader:
        assert len(server.traffic.requests) == first + 1, "the index is kept"
        reader.read(0, 3)
        assert len(server.traffic.requests) == first + 2
        reader.read(0, 3, "up")
        assert len(server.traffic.requests) == first + 3


def test_a_kept_index_that_is_damaged_is_fetched_anew(
    server: FileServer, address: str, tmp_path: Path
) -> None:
    with moepack.Pack(address):
        pass
    (kept,) = (tmp_path / "cache" / "moepack").glob("index-*")
    length = kept.stat().st_size
    for offset in (*range(0, length, 997), length - 1):
        flip(kept, offset)
        with moepack.Pack(address) as pack:
            assert pack.layers == (0, 1)
    kept.write_bytes(kept.read_bytes()[:-1])
    with moepack.Pack(address):
        pass
    assert kept.stat().st_size == length


def test_a_file_that_is_replaced_under_a_reader_is_an_error(
    server: FileServer, address: str
) -> None:
    with moepack.Pack(address) as pack, pack.reader(check="never") as reader:
        reader.read(0, 0)
        data_file = server.folder / "a.moepack" / "experts-00000.bin"
        data_file.write_bytes(data_file.read_bytes()[::-1])
        with pytest.raises(MachineError, match="the file changed while it was being read"):
            reader.read(0, 1)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [("short", "the connection was cut off"), ("error inside", "200 OK with something else")],
)
def test_a_read_that_fails_is_never_a_finding(
    server: FileServer, address: str, fault: Fault, problem: str
) -> None:
    if fault == "short":
        server.fault = lambda number: "short" if number == 3 else None
        assert moepack.verify(address).passed
    server.head_fault = "status"
    with pytest.raises(MachineError, match="cannot open: 503"):
        moepack.verify(address)
    server.head_fault = None
    opened = len(server.traffic.gets()) + 2
    server.fault = lambda number: fault if number >= opened else None
    with pytest.raises(MachineError, match=problem) as failure:
        moepack.verify(address)
    assert failure.value.hint


def test_what_is_no_pack_is_named(server: FileServer) -> None:
    with pytest.raises(PackError, match="no pack here: no manifest.json"):
        moepack.Pack(f"{server.url}/b.moepack")
    server.fault, server.status = lambda number: "status", 403
    with pytest.raises(MachineError, match="cannot read: 403 Forbidden") as refusal:
        moepack.Pack(f"{server.url}/a.moepack")
    assert refusal.value.hint


NEED_FILES: dict[str, Callable[[str, Path], object]] = {
    "mount": lambda address, folder: mount(address, folder / "mounted"),
    "mirror": lambda address, folder: moepack.mirror_pack(address, folder),
    "rank": lambda address, folder: moepack.rank_pack(address, hotness_of({(0, 1): 2})),
    "bench": lambda address, folder: moepack.bench_pack(address),
    "machine": lambda address, folder: moepack.measure_machine(address),
}


@pytest.mark.parametrize("call", NEED_FILES.values(), ids=NEED_FILES)
def test_what_needs_files_of_this_machine_is_refused_by_name(
    call: Callable[[str, Path], object], address: str, tmp_path: Path
) -> None:
    (tmp_path / "mounted").mkdir()
    with pytest.raises(RequestError, match="the pack is in a store") as refusal:
        call(address, tmp_path)
    assert str(refusal.value.path) == address


def test_a_pack_in_a_store_is_restored_and_exported(
    server: FileServer, address: str, tmp_path: Path
) -> None:
    moepack.restore(address, tmp_path / "shards")
    for shard in shards_of("qwen3moe"):
        assert filecmp.cmp(shard, tmp_path / "shards" / Path(shard).name, shallow=False)
    moepack.export("gguf", address, tmp_path / "store" / "a.gguf")
    assert open_source(f"{server.url}/a.gguf").architecture == "qwen3moe"
