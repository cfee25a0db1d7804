"""A machine that has not enough threads, open files or memory is named as what is at fault."""

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.common import digest
from moepack.common.errors import MachineError
from moepack.pack.verifying.verifier import verify
from tests.support.children import MOEPACK, run_command
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.machine_faults import needs_strace
from tests.support.models import FIXTURES, first_shard, pack_model
from tests.support.needs import require_llama
from tests.support.warm_command import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model of several shards in `model`, and pack it beside them into `pack`."""
    folder = tmp_path_factory.mktemp("short")
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
    command: str, model: Path, tmp_path: Path, cli: Run
) -> None:
    arguments = {
        "pack": ("pack", model / "model", "-o", tmp_path / "pack"),
        "verify": ("verify", model / "pack"),
    }[command]
    names = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = cli(*arguments, env=names, preexec_fn=no_more_threads)
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
    opened = [*spare, highest]
    try:
        # Fill the gaps below, then free as many as may be opened.
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        while True:
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for descriptor in spare:
            os.close(descriptor)
            opened.remove(descriptor)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in opened:
            os.close(descriptor)


TRACE = str(FIXTURES / "qwen3moe-trace.csv")
MODEL = str(first_shard("qwen3moe"))
AT = ("--layer", "0", "--expert", "1")
SMALL = ("-n", "2", "--memory", "floor", "--context", "64", "--threads", "1")
BRIEF = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0.001")
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{model}"),
    "pack": ("pack", "{model}", "-o", "{out}"),
    "verify": ("verify", "{pack}", "--source", "{model}"),
    "extract": ("extract", "{pack}", *AT, "-o", "{out}"),
    "list": ("list", "{pack}"),
    "index": ("index", "{model}", "-o", "{out}", "--digests"),
    "restore": ("restore", "{pack}", "-o", "{out}"),
    "export": ("export", "gguf", "{pack}", "-o", "{out}"),
    "trace import": ("trace", "import", TRACE, "-o", "{out}"),
    "hotness": ("hotness", TRACE, "-o", "{out}"),
    "simulate": ("simulate", TRACE, "--model", "{pack}", "--policies", "lru"),
    "place": ("place", "{pack}", "--ram", "64GiB"),
    "bench": ("bench", "{pack}", "--source", "{model}", *BRIEF),
    "run": ("run", "{pack}", "-p", "Hi", *SMALL),
}


@pytest.fixture(scope="module")
def real_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model that can be run."""
    target = tmp_path_factory.mktemp("real") / "pack"
    pack_model([first_shard("qwen3moe")], target)
    return target


@pytest.mark.parametrize("command", COMMANDS)
def test_a_machine_that_opens_no_more_files_says_what_to_do(
    command: str, real_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the number of files that a command may open."""
    if command == "run":
        require_llama()

    def run(number: int) -> int:
        names = {"model": MODEL, "pack": real_pack, "out": tmp_path / str(number)}
        return main.run([word.format(**names) for word in COMMANDS[command]])

    assert run(99) == 0, "modules that are loaded when they are used are loaded now"
    capsys.readouterr()
    codes = set()
    for count in range(14):
        with open_files(count):
            code = run(count)
        said = capsys.readouterr().err
        codes.add(code)
        if code:
            assert (code, "mistake in moepack" in said) == (6, False), (count, said)
            assert "hint: raise the limit of open files (ulimit -n)" in said, (count, said)
    assert 6 in codes


LITTLE_MEMORY = """
import io, json, resource, sys
from contextlib import redirect_stderr, redirect_stdout
from moepack.cli import main

def stream():
    # As Python opens its own: one without an encoding makes click import the codec of ASCII.
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)

def run(arguments):
    with redirect_stdout(stream()), redirect_stderr(stream()) as said:
        return main.run(arguments), said.buffer.getvalue().decode()

arguments = sys.argv[1:]
if arguments[0] == "warm":
    from tests.support import measurements
    measurements.shorten()
    del arguments[0]
    assert run(arguments)[0] == 0
_, hard = resource.getrlimit(resource.RLIMIT_AS)
for room in (0, 1, 4, 16, 64, 256):
    length = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (length + (room << 20), hard))
    outcome = run(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(json.dumps([int(outcome[0]), outcome[1]]))
"""


@pytest.mark.parametrize("is_warm", [False, True], ids=["while it loads", "while it works"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("machine", MODEL, "--seconds", "0"),
        ("trace", "concentration", TRACE),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_machine_that_is_short_of_memory_says_what_to_do(
    arguments: tuple[str, ...], is_warm: bool
) -> None:
    """Both while libraries are loaded, with the words of the loader, and while it works."""
    words = ["warm"] * is_warm + list(arguments)
    names = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = run_command(sys.executable, "-c", LITTLE_MEMORY, *words, env=names)
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    failures = [said for code, said in outcomes if code]
    assert {code for code, _ in outcomes} <= {0, 6}, outcomes
    for said in failures:
        assert "hint: " in said
        assert "ulimit" in said
    # The library that numpy brings ends the process itself where it gets no memory.
    if failures or "OpenBLAS" not in run.stderr:
        assert failures
        assert any("not enough memory" in said for said in failures)


DATA, SHARD = "pack/experts-00002.bin", "model/model-00002-of-00006.gguf"
READ = "?preadv,?preadv2"


@needs_strace()
@pytest.mark.parametrize(
    ("command", "file", "call"),
    [
        *(("verify", DATA, call) for call in ("openat", READ)),
        *(("verify", SHARD, call) for call in ("openat", "mmap", READ)),
        *(("pack", SHARD, f"openat:when={number}") for number in (1, 2, 3)),
        *(("pack", SHARD, call) for call in (READ, "pread64")),
    ],
)
def test_a_machine_without_memory_is_at_fault_and_not_the_pack_nor_the_source(
    command: str, file: str, call: str, model: Path, tmp_path: Path
) -> None:
    arguments = {
        "verify": ("verify", model / "pack", "--source", model / "model"),
        "pack": ("pack", model / "model", "-o", tmp_path / "pack"),
    }[command]
    name, _, when = call.partition(":")
    fault = ":".join(filter(None, (f"inject={name}", "error=ENOMEM", when)))
    traced = ["strace", "-f", "-qq", "-o", os.devnull, "-P", str(model / file), "-e", fault]
    run = run_command(*traced, *MOEPACK, *arguments)
    assert run.returncode == 6, run.stderr
    assert Path(file).name in run.stderr
    assert "Cannot allocate memory" in run.stderr


def test_verifying_without_memory_says_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(digest, "xxh3", allocate)
    with pytest.raises(MachineError, match="not enough memory") as caught:
        verify(model / "pack", threads=1)
    assert caught.value.hint == "use fewer `threads`"
