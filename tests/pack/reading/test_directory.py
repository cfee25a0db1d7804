"""The files of a pack: links to them are as good; FIFOs, devices and others are refused."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, PackError
from moepack.pack.reading.directory import named_pack
from moepack.pack.verifying.verifier import verify
from tests.support.children import run_child, within
from tests.support.models import keys_of, on_disk


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a socket's path has a hundred letters at most


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_what_is_no_file_is_refused_by_its_kind(
    pack_copy: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pack_copy)
    (pack_copy / name).unlink()
    KINDS[kind](pack_copy / name)
    for look in (moepack.open, verify):
        with pytest.raises(PackError, match=f"{name}.*: not a regular file, found {kind}"):
            within(lambda look=look: look(pack_copy))  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_file_that_is_none_is_refused_by_its_kind(
    pack_copy: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pack_copy)
    with moepack.open(pack_copy) as pack:
        path = pack.locate(0, 0).path
        path.unlink()
        KINDS[kind](path)
        problem = f"{path.name}: layer 0 expert 3 blob at byte .*: not a regular file, found {kind}"
        for backend in ("auto", name):
            with within(lambda backend=backend: pack.reader(backend=backend)) as reader:  # type: ignore[misc]
                with pytest.raises(PackError, match=problem):
                    within(lambda: reader.read(0, 3))
                with pytest.raises(PackError, match=problem):
                    within(lambda: list(reader.read_many([(0, 3)])))
                assert reader.read(1, 3) == on_disk(pack.locate(1, 3))


def test_links_to_files_are_as_good_as_files(pack_copy: Path, name: str) -> None:
    """Caches of hubs are made of links."""
    (pack_copy / "blobs").mkdir()
    for number, path in enumerate(sorted(pack_copy.glob("*.*"))):
        path.rename(pack_copy / "blobs" / str(number))
        path.symlink_to(Path("blobs") / str(number))
    with moepack.open(pack_copy) as pack, pack.reader(backend=name) as reader:
        for one in reader.read_many(keys_of(pack)):
            assert one.view == on_disk(pack.locate(one.layer, one.expert))


@pytest.mark.parametrize("spare", [0, 1])
def test_too_many_open_files_are_the_machines_fault(packs: dict[str, Path], spare: int) -> None:
    """The mapping needs a descriptor of its own beside the file's."""
    code = """
        import os, resource, sys, moepack
        moepack.Pack, moepack.MachineError  # loaded before
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[2]), 4096))
        try:
            moepack.open(sys.argv[1])
        except moepack.MachineError as error:
            print(os.path.basename(error.path), error.problem, error.hint, sep="|")
    """
    name = ["manifest.json", "index.bin"][spare]
    problem = "cannot read: Too many open files|raise the limit of open files (ulimit -n)"
    assert run_child(code, packs["qwen3moe"], str(spare)) == f"{name}|{problem}\n"


def test_python_that_has_no_memory_is_the_machines_fault(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("moepack.pack.reading.pack.Index", refuse)
    with pytest.raises(MachineError, match="no memory is left"):
        moepack.open(packs["qwen3moe"])


def test_a_directory_with_a_file_of_a_pack_looks_like_one(pack_copy: Path) -> None:
    assert named_pack(pack_copy) == pack_copy
    for path in pack_copy.iterdir():
        path.unlink()
    assert named_pack(pack_copy) is None
    (pack_copy / "pack.journal").touch()
    assert named_pack(pack_copy) == pack_copy
    assert named_pack([str(pack_copy)]) == pack_copy
    assert named_pack([pack_copy, pack_copy]) is None
    assert named_pack([]) is None
