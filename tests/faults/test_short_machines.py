"""A machine that has not enough threads, open files or memory is named as what is at fault."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moepack import digest
from moepack.errors import MachineError
from moepack.verifying.verifier import verify
from tests.support.children import PATIENCE
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.machine_faults import needs_strace
from tests.support.models import pack_model

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model of several shards in `model`, and pack it beside them into `pack`."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "model").mkdir()
    write_shards(split(moe((0, 1, 2, 3)), 3), folder / "model")
    pack_model([folder / "model"], folder / "pack")
    return folder


def no_more_threads() -> None:
    """Let no thread start: its stack would not fit into what a process may map.

    A limit on threads would do, but holds for others than root alone.
    """
    gibibyte = 1 << 30
    resource.setrlimit(resource.RLIMIT_STACK, (64 * gibibyte, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (16 * gibibyte, resource.RLIM_INFINITY))


@pytest.mark.parametrize("command", ["pack", "verify"])
def test_a_machine_that_starts_no_more_threads_is_at_fault(
    command: str, model: Path, tmp_path: Path
) -> None:
    arguments = {
        "pack": ("pack", model / "model", "-o", tmp_path / "pack"),
        "verify": ("verify", model / "pack"),
    }[command]
    run = subprocess.run(
        [sys.executable, "-m", "moepack", *map(str, arguments)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=no_more_threads,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 6, run.stderr
    assert "thread" in run.stderr
    assert "--threads" in run.stderr
    assert "mistake in moepack" not in run.stderr
    assert not (tmp_path / "pack").exists()


@contextmanager
def open_files(count: int) -> Iterator[None]:
    """Let this process open `count` files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    highest = os.open(os.devnull, os.O_RDONLY)
    held = [*spare, highest]
    try:
        # Fill the gaps below, then free as many as may be opened.
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for descriptor in spare:
            os.close(descriptor)
            held.remove(descriptor)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


def test_a_machine_that_opens_no_more_files_is_at_fault_and_not_the_pack_nor_the_source(
    model: Path,
) -> None:
    """Whatever the number of files that may still be opened, there are no findings."""
    outcomes: list[bool | str | None] = []
    for count in range(12):
        with open_files(count):
            try:
                outcomes.append(verify(model / "pack", model / "model", threads=1).passed)
            except MachineError as error:
                outcomes.append(error.problem)
    assert {type(outcome) for outcome in outcomes} == {str, bool}
    assert False not in outcomes
    assert all("Too many open files" in str(outcome) or outcome is True for outcome in outcomes)


@needs_strace()
@pytest.mark.parametrize(
    ("file", "call"),
    [
        ("pack/experts-00002.bin", "openat"),
        ("pack/experts-00002.bin", "?preadv,?preadv2"),
        ("model/model-00002-of-00006.gguf", "openat"),
        ("model/model-00002-of-00006.gguf", "mmap"),
        ("model/model-00002-of-00006.gguf", "?preadv,?preadv2"),
    ],
)
def test_a_machine_without_memory_is_at_fault_and_not_the_pack_nor_the_source(
    file: str, call: str, model: Path
) -> None:
    arguments = ("verify", model / "pack", "--source", model / "model")
    assert_out_of_memory(model / file, call, *arguments)


@needs_strace()
@pytest.mark.parametrize(
    "call", ["openat:when=1", "openat:when=2", "openat:when=3", "?preadv,?preadv2", "read"]
)
def test_a_machine_without_memory_is_at_fault_where_a_source_is_packed(
    call: str, model: Path, tmp_path: Path
) -> None:
    shard = model / "model" / "model-00002-of-00006.gguf"
    assert_out_of_memory(shard, call, "pack", model / "model", "-o", tmp_path / "pack")


def assert_out_of_memory(file: Path, call: str, *arguments: str | Path) -> None:
    """Run the command where `call` on `file` gets no memory: it says that of the machine."""
    name, _, when = call.partition(":")
    fault = ":".join(filter(None, (f"inject={name}", "error=ENOMEM", when)))
    traced = ["strace", "-f", "-qq", "-o", os.devnull, "-P", str(file), "-e", fault]
    command = [*traced, sys.executable, "-m", "moepack", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 6, run.stderr
    assert file.name in run.stderr
    assert "Cannot allocate memory" in run.stderr


def test_verifying_without_memory_says_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(digest, "of", allocate)
    with pytest.raises(MachineError, match="not enough memory") as caught:
        verify(model / "pack", threads=1)
    assert caught.value.hint == "use fewer --threads"


def test_pipes_in_place_of_files_are_not_waited_for(
    model: Path, tmp_path: Path, moepack_command: Command
) -> None:
    pack_model([model / "model"], tmp_path / "pack")
    data_file = tmp_path / "pack" / "experts-00001.bin"
    data_file.unlink()
    os.mkfifo(data_file)
    run = moepack_command("verify", tmp_path / "pack")
    assert run.returncode == 5
    assert "experts-00001.bin" in run.stdout
    assert "not a regular file" in run.stdout
    os.mkfifo(tmp_path / "model.gguf")
    run = moepack_command(*("verify", model / "pack", "--source", tmp_path / "model.gguf"))
    assert run.returncode == 3
    assert "not a regular file" in run.stderr
