"""Stores of objects, through a web server with faults, and moto's S3."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.common.paths import RemotePath, is_remote, parse_address
from moepack.storage.input_file import open_input
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.store import RemoteError, Store
from moepack.storage.remote.stores import forget_stores, store_of
from tests.support.buckets import bucket_of_moto
from tests.support.remote_servers import Fault, FileServer, file_server

pytest.importorskip("obstore")

DATA = random.Random(1).randbytes(5_000_000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote_store, "PAUSES", (0.0, 0.0))
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "file").write_bytes(DATA)
    forget_stores()
    with file_server(tmp_path) as one:
        yield one


@pytest.fixture
def path(server: FileServer) -> RemotePath:
    return parse_address(f"{server.url}/a folder/file")


def read(path: RemotePath, offset: int, length: int) -> bytes:
    return b"".join(open_input(path).stream(offset, length))


def test_addresses_are_taken_apart_and_put_together_again() -> None:
    for address in (
        "s3://bucket/a/b.gguf",
        "https://host:1/f",
        "hf://o/n@abc/Q4/x-1.gguf",
        "gs://b",
    ):
        path = parse_address(address)
        assert str(path) == os.fspath(path) == address
        assert is_remote(address)
        assert is_remote(path)
    path = parse_address("hf://o/n@abc/Q4/x-1.gguf")
    assert (path.store, path.key, path.name, path.suffix) == (
        "hf://o/n@abc",
        "Q4/x-1.gguf",
        "x-1.gguf",
        ".gguf",
    )
    assert path.parent / "y" == parse_address("hf://o/n@abc/Q4/y")
    assert not any(
        is_remote(name) for name in ("/a/b", "C:/x", "s3:/bucket", "file:///x", Path("s3://x"))
    )
    for wrong in (
        "s3://b/x\x1b",
        "s3:///key",
        "hf://owner",
        "https://me:secret@host/x",
        "https://host/x?sig=1",
    ):
        with pytest.raises(ValueError, match="address"):
            parse_address(wrong)


def test_a_range_is_the_bytes_of_the_file_and_ends_where_that_ends(path: RemotePath) -> None:
    for offset, length in ((0, 10), (4_999_990, 10), (123_456, 3_000_000)):
        assert read(path, offset, length) == DATA[offset : offset + length]
    file = open_input(path)
    assert file.stamp.length == len(DATA)
    buffer = memoryview(bytearray(100))
    assert file.read_into(len(DATA) - 30, buffer) == 30
    assert buffer[:30] == DATA[-30:]
    assert file.read_into(len(DATA), buffer) == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["cut", "status", "short", "less"])
def test_answers_that_are_refused_or_have_too_few_bytes_are_continued(
    fault: Fault, server: FileServer, path: RemotePath
) -> None:
    server.fault = lambda number: None if number % 3 == 2 else fault
    assert read(path, 0, len(DATA)) == DATA
    assert len(server.traffic.gets()) > 2
    server.fault = lambda number: fault
    with pytest.raises(RemoteError, match="the connection was cut off|503"):
        read(path, 0, len(DATA))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["cut", "less"])
def test_interruptions_do_not_count_while_bytes_come(
    fault: Fault, server: FileServer, path: RemotePath
) -> None:
    """Each answer brings some, and there are more than the attempts for one."""
    server.fault = lambda number: fault if number < 20 else None
    assert read(path, 0, len(DATA)) == DATA
    assert len(server.traffic.gets()) > 3


def test_an_error_in_place_of_a_range_is_said(server: FileServer, path: RemotePath) -> None:
    server.fault = lambda number: "error inside"
    with pytest.raises(RemoteError, match="200 OK with something else than the range") as error:
        read(path, 0, 10)
    assert "the text of an error" in str(error.value.hint)


def test_a_server_that_refuses_for_good_is_named_by_its_answer(
    server: FileServer, path: RemotePath
) -> None:
    """Credentials do not come by waiting; those that were good before have expired."""
    server.fault, server.status = lambda number: "status", 403
    for hint in ("credentials", "expired"):
        server.traffic.requests.clear()
        with pytest.raises(RemoteError, match="403 Forbidden") as refusal:
            read(path, 0, 10)
        assert hint in str(refusal.value.hint)
        assert len(server.traffic.gets()) == 1
        server.fault = lambda number: None
        read(path, 0, 10)
        server.fault = lambda number: "status"


@pytest.mark.long
def test_a_limit_is_waited_for(server: FileServer, path: RemotePath) -> None:
    server.fault = lambda number: "status" if number < 11 else None
    server.status = 429
    assert read(path, 5, 10) == DATA[5:15]


def test_a_file_that_is_replaced_is_noticed(server: FileServer, path: RemotePath) -> None:
    file = open_input(path)
    target = server.folder / path.key
    target.write_bytes(DATA[::-1])
    os.utime(target, ns=(1, 1))
    with pytest.raises(RemoteError, match="changed"):
        list(file.stream(0, 10))
    assert file.current_stamp() != file.stamp


def test_what_is_not_there_is_a_missing_file(path: RemotePath) -> None:
    with pytest.raises(FileNotFoundError):
        open_input(path.parent / "other")


@pytest.mark.long
def test_nobody_at_the_address_is_an_error_without_its_query() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RemoteError) as error:
        open_input(f"http://127.0.0.1:{port}/x")
    assert error.value.hint


@pytest.fixture(scope="module")
def bucket() -> Iterator[Store]:
    with bucket_of_moto() as address:
        yield store_of(RemotePath(address))


@pytest.mark.long
def test_objects_are_written_once_listed_told_apart_and_removed(bucket: Store) -> None:
    bucket.put("pack/a", b"one", new=True)
    with pytest.raises(FileExistsError):
        bucket.put("pack/a", b"another", new=True)
    bucket.put("pack/b", b"three")
    bucket.put("packs/c", b"")
    lengths = {key: stamp.length for key, stamp in bucket.objects("pack")}
    assert lengths == {"pack/a": 3, "pack/b": 5}
    assert (bucket.read("pack/a", 100), bucket.read("pack/b", 100)) == (b"one", b"three")
    first = bucket.stamp("pack/b")
    assert first == bucket.stamp("pack/b")
    bucket.put("pack/b", b"other")
    assert first != bucket.stamp("pack/b")
    bucket.delete("pack/a")
    with pytest.raises(FileNotFoundError):
        bucket.stamp("pack/a")
