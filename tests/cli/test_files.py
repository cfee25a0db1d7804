"""Files of commands: `-`, what exists already, what is never written over, folders that lack."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import moepack
from moepack.cli import main
from moepack.common.errors import MachineError
from tests.support.children import within
from tests.support.models import FIXTURES, first_shard, shards_of
from tests.support.special_files import SPECIAL, is_special, make_special
from tests.support.warm_command import Run

TRACE = FIXTURES / "qwen3moe-trace.csv"
HOTNESS = FIXTURES / "qwen3moe-hotness.csv"
IMATRIX = FIXTURES / "qwen3moe-imatrix.gguf"
LAYOUT = FIXTURES.parent / "layouts" / "layers.toml"
AT = ("--layer", "0", "--expert", "2")

BRIEF_BENCH = (
    *("bench", "{pack}", "--seconds", "0", "--depths", "1", "--length", "64KiB"),
    *("--point-seconds", "0.001"),
)
OUTPUTS: dict[str, tuple[str, ...]] = {
    "extract": ("extract", "{pack}", *AT, "-o"),
    "trace import": ("trace", "import", str(TRACE), "-o"),
    "hotness": ("hotness", str(TRACE), "-o"),
    "trace concentration": ("trace", "concentration", str(TRACE), "--plot"),
    "bench": (*BRIEF_BENCH, "--plot"),
    "report": ("report", str(first_shard("mixtral")), "-o"),
}
"""What writes a file, up to its name. Recording is in test_trace.py: it needs llama.cpp."""


@pytest.fixture(params=["extract", "trace import", "hotness", "trace concentration"])
def command(request: pytest.FixtureRequest, packs: dict[str, Path]) -> list[str]:
    """Name commands that write a file in all ways, up to the file."""
    return words_of(request.param, packs)


def words_of(output: str, packs: dict[str, Path]) -> list[str]:
    return [word.format(pack=packs["qwen3moe"]) for word in OUTPUTS[output]]


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_exists_is_written_over_only_when_that_is_asked_for(
    output: str, packs: dict[str, Path], tmp_path: Path, cli: Run
) -> None:
    command, target = words_of(output, packs), tmp_path / "file.svg"
    target.write_text("old")
    refused = cli(*command, target)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {target}: exists already\nhint: --force writes over")
    assert target.read_text() == "old"
    forced = cli(*command, target, "--force")
    notes = [line for line in forced.stderr.splitlines() if not line.startswith("note: ")]
    assert (forced.returncode, notes) == (0, [])
    assert target.read_text(errors="replace") != "old"
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("name", ["shard", "model.gguf", "model.gguf.part1of2", "link", "pack"])
def test_shards_and_packs_are_never_written_over(
    name: str, tmp_path: Path, packs: dict[str, Path], pack_copy: Path, cli: Run
) -> None:
    target = tmp_path / name
    if name == "pack":
        target = pack_copy / "experts-00000.bin"
    elif name == "link":
        target.symlink_to(shutil.copy(first_shard("qwen3moe"), tmp_path / "model"))
    elif name == "shard":
        shutil.copy(first_shard("qwen3moe"), target)
    else:
        target.write_text("a piece of a shard has no magic number")
    before = target.read_bytes()
    for output in OUTPUTS if name == "shard" else ("extract",):
        run = cli(*words_of(output, packs), target, "--force")
        assert run.returncode == 2
        assert "is never overwritten" in run.stderr
        assert target.read_bytes() == before


def test_a_pack_that_is_being_made_is_not_written_over(
    packs: dict[str, Path], pack_copy: Path, cli: Run
) -> None:
    (pack_copy / "manifest.json").rename(pack_copy / "pack.journal")
    run = cli(*words_of("extract", packs), pack_copy / "experts-00000.bin", "--force")
    assert (run.returncode, "a file of a pack" in run.stderr) == (2, True)


def test_a_missing_folder_is_named(command: list[str], tmp_path: Path, cli: Run) -> None:
    run = cli(*command, tmp_path / "no" / "file.svg")
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {tmp_path / 'no'}: no such folder\nhint: ")
    run = cli(*command, tmp_path)
    assert (run.returncode, "a folder, not a file" in run.stderr) == (2, True)


def test_standard_output_is_a_file_like_others(
    command: list[str], tmp_path: Path, cli: Run
) -> None:
    """Also one that the shell opened as a file; all else goes to the other stream."""
    target = tmp_path / "file.svg"
    assert cli(*command, target, "--json").returncode == 0
    with open(tmp_path / "redirected", "wb") as file:
        file.write(b"before ")
        file.flush()
        options: Any = {"capture_output": False, "stdout": file, "stderr": subprocess.PIPE}
        run = cli(*command, "-", "--json", **options)
    assert run.returncode == 0
    assert json.loads(run.stderr)
    data = (tmp_path / "redirected").read_bytes().removeprefix(b"before ")
    assert len(data) > 100, "times that were measured differ"
    assert data[:64] == target.read_bytes()[:64]


def test_a_failure_puts_nothing_on_standard_output(tmp_path: Path, cli: Run) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("layer,expert,count\n0,1,1\n0,x,1\n")
    for command in (("hotness",), ("trace", "import")):
        run = cli(*command, bad, "-o", "-")
        assert (run.returncode, run.stdout) == (3, "")
        assert cli(*command, bad, "-o", "-", "--lenient", text=False).returncode == 0


def test_a_file_that_is_read_is_not_written_over(tmp_path: Path, cli: Run) -> None:
    trace = Path(shutil.copy(TRACE, tmp_path / "trace.csv"))
    (tmp_path / "link").symlink_to(trace)
    for command in (("hotness",), ("trace", "import")):
        for target in (trace, tmp_path / "link"):
            run = cli(*command, trace, "-o", target, "--force")
            assert (run.returncode, "one of the files to read" in run.stderr) == (2, True)
    assert trace.read_bytes() == TRACE.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (("trace", "import", "-", "-o", "{tmp}/t"), TRACE),
        (("trace", "stats", "-"), TRACE),
        (("trace", "concentration", "-"), TRACE),
        (("hotness", "-", "-o", "{tmp}/h"), TRACE),
        (("hotness", "-", "-o", "-"), IMATRIX),
        (("pack", "{model}", "-o", "{tmp}/p", "--hotness", "-"), HOTNESS),
        (("pack", "{model}", "-o", "{tmp}/p", "--hotness", "-"), IMATRIX),
        (("pack", "{model}", "-o", "{tmp}/p", "--layout", "-"), LAYOUT),
        ((*BRIEF_BENCH, "--trace", "-"), TRACE),
        ((*BRIEF_BENCH, "--hotness", "-"), HOTNESS),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "-".join(value[:2]),
)
def test_standard_input_is_read_like_a_file(
    arguments: tuple[str, ...],
    data: Path,
    tmp_path: Path,
    packs: dict[str, Path],
    cli: Run,
) -> None:
    names = {"tmp": tmp_path, "model": first_shard("qwen3moe"), "pack": packs["qwen3moe"]}
    words = [word.format(**names) for word in arguments]
    run = cli(*words, input=data.read_bytes(), text=False)
    assert run.returncode == 0, run.stderr


STREAMS = ("a FIFO", "a device")


@pytest.mark.parametrize("kind", SPECIAL)
def test_streams_are_written_to_and_stay(
    kind: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is no file is neither replaced nor recommended to be, by any command."""
    target = tmp_path / "stream.svg"
    make_special(kind, target)
    takes_streams = command[:2] != ["trace", "import"] and kind in STREAMS
    with ExitStack() as stack:
        pieces = stack.enter_context(drained(target)) if kind == "a FIFO" else []
        for force in (["--force"],) if takes_streams else ([], ["--force"]):
            code = main.run([*command, str(target), *force])
            errors = capsys.readouterr().err
            assert (code, "--force" in errors) == (0 if takes_streams else 2, False), errors
    assert is_special(kind, target)
    assert os.listdir(tmp_path) == [target.name]
    assert bool(pieces) == (takes_streams and kind == "a FIFO")


@contextmanager
def drained(fifo: Path) -> Iterator[list[bytes]]:
    """Read all that is written into a FIFO; what it was is there when the `with` ends."""
    pieces: list[bytes] = []
    reading, writing = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), os.open(fifo, os.O_WRONLY)
    os.set_blocking(reading, True)

    def read() -> None:
        while piece := os.read(reading, 1 << 16):
            pieces.append(piece)

    reader = Thread(target=read)
    reader.start()
    try:
        yield pieces
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_needs_a_file_refuses_what_is_none(
    kind: str, tmp_path: Path, packs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Path(shards_of("qwen3moe")[2]).name
    for name in (shard, "model.gguf"):
        make_special(kind, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "model.gguf")
    pack = str(packs["qwen3moe"])
    for output in (
        ("restore", pack, "-o", str(tmp_path)),
        ("export", "gguf", pack, "-o", str(tmp_path / "model.gguf")),
        ("export", "gguf", pack, "-o", str(tmp_path / "link")),
    ):
        for force in ((), ("--force",), ("--resume",), ("--resume", "--force")):
            assert main.run([*output, *force]) == 2
            said = capsys.readouterr().err
            assert f"{kind.replace('drive', 'device')} has this name" in said
            assert "--force" not in said
    assert all(is_special(kind, tmp_path / name) for name in (shard, "model.gguf"))
    assert sorted(os.listdir(tmp_path)) == sorted([shard, "model.gguf", "link"])


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_in_the_making_takes_the_place_of_no_device(
    kind: str, tmp_path: Path, packs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "model.gguf.partial"
    make_special(kind, partial)
    command = ["export", "gguf", str(packs["qwen3moe"]), "-o", str(tmp_path / "model.gguf")]
    for force in ((), ("--force",), ("--resume",)):
        assert main.run([*command, *force]) == 2
        assert f"{partial}: {kind.replace('drive', 'device')} has" in capsys.readouterr().err
    partial.rename(tmp_path / "trace.partial")
    with pytest.raises(MachineError, match="not a regular file"):
        within(lambda: moepack.import_trace([str(TRACE)], tmp_path / "trace"))
    assert is_special(kind, tmp_path / "trace.partial")
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_resumed_pack_takes_nothing_away_that_is_no_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "pack"
    target.mkdir()
    (target / "pack.journal").touch()
    make_special(kind, target / "index.bin")
    shard = str(first_shard("qwen3moe"))
    assert within(lambda: main.run(["pack", shard, "-o", str(target), "--resume"])) == 6
    assert "not a regular file" in capsys.readouterr().err
    assert is_special(kind, target / "index.bin")


def test_standard_output_has_more_names(packs: dict[str, Path], cli: Run) -> None:
    command = ("hotness", TRACE, "-q", "-o")
    expected = cli(*command, "-").stdout
    assert expected
    for name in ("/dev/stdout", "/dev/fd/1"):
        assert cli(*command, name).stdout == expected
        run = cli("export", "gguf", packs["qwen3moe"], "-o", name)
        assert (run.returncode, "cannot be written to standard output" in run.stderr) == (2, True)


def test_a_file_that_is_open_is_not_replaced_under_its_name(
    tmp_path: Path, packs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as /dev/stderr: what would be replaced there is the link in /dev."""
    with open(tmp_path / "log", "w") as log:
        link = tmp_path / "stderr"
        link.symlink_to(f"/proc/self/fd/{log.fileno()}")
        for command in (("export", "gguf"), ("extract", *AT)):
            words = [*command, str(packs["qwen3moe"]), "-o", str(link), "--force"]
            assert main.run(words) == 2
            assert "a link to an open file has this name" in capsys.readouterr().err
    assert link.is_symlink()
