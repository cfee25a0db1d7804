"""Files of commands: `-`, what exists already, what is never written over, folders that lack."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import moepack
from moepack.cli import main
from moepack.errors import MachineError
from tests.support.children import within
from tests.support.models import FIXTURES, first_shard, shards_of
from tests.support.special_files import SPECIAL, is_special, make_special

Run = Callable[..., subprocess.CompletedProcess[str]]
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
    "verify": ("verify", "{pack}", "--junit"),
    "trace concentration": ("trace", "concentration", str(TRACE), "--plot"),
    "bench": (*BRIEF_BENCH, "--plot"),
}
"""What writes a file, up to its name. Recording is in test_trace.py: it needs llama.cpp."""


@pytest.fixture(params=OUTPUTS)
def command(request: pytest.FixtureRequest, packs: dict[str, Path]) -> list[str]:
    """Name each command that writes a file, up to the file."""
    return words_of(request.param, packs)


def words_of(output: str, packs: dict[str, Path]) -> list[str]:
    return [word.format(pack=packs["qwen3moe"]) for word in OUTPUTS[output]]


def test_what_exists_is_written_over_only_when_that_is_asked_for(
    command: list[str], tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "file.svg"
    assert moepack_command(*command, target).returncode == 0
    new = target.read_bytes()
    target.write_text("old")
    refused = moepack_command(*command, target)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {target}: exists already\nhint: --force writes over")
    assert target.read_text() == "old"
    forced = moepack_command(*command, target, "--force")
    notes = [line for line in forced.stderr.splitlines() if not line.startswith("note: ")]
    assert (forced.returncode, notes) == (0, [])
    assert target.read_bytes()[:20] == new[:20]
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize(
    ("output", "name"),
    [
        *((output, "shard") for output in OUTPUTS),
        *(("extract", name) for name in ("model.gguf", "model.gguf.part1of2", "link", "pack")),
    ],
)
def test_shards_and_packs_are_never_written_over(
    output: str,
    name: str,
    tmp_path: Path,
    packs: dict[str, Path],
    pack_copy: Path,
    moepack_command: Run,
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
    for force in ((), ("--force",)):
        run = moepack_command(*words_of(output, packs), target, *force)
        assert run.returncode == 2
        assert "is never written over" in run.stderr
        assert target.read_bytes() == before


def test_a_pack_that_is_being_made_is_not_written_over(
    command: list[str], pack_copy: Path, moepack_command: Run
) -> None:
    (pack_copy / "manifest.json").rename(pack_copy / "pack.journal")
    run = moepack_command(*command, pack_copy / "experts-00000.bin", "--force")
    assert (run.returncode, "a file of a pack" in run.stderr) == (2, True)


def test_a_missing_folder_is_named(
    command: list[str], tmp_path: Path, moepack_command: Run
) -> None:
    run = moepack_command(*command, tmp_path / "no" / "file.svg")
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {tmp_path / 'no'}: no such folder\nhint: ")
    run = moepack_command(*command, tmp_path)
    assert (run.returncode, "a folder, not a file" in run.stderr) == (2, True)


def test_standard_output_is_a_file_like_others(
    command: list[str], tmp_path: Path, moepack_command: Run
) -> None:
    """Also where it is a file that the shell opened; what is printed goes to the other stream."""
    target = tmp_path / "file.svg"
    assert moepack_command(*command, target, "--json").returncode == 0
    run: Any = moepack_command(*command, "-", "--json", text=False)
    assert run.returncode == 0
    assert similar(run.stdout, target.read_bytes())
    assert json.loads(run.stderr)
    with open(tmp_path / "redirected", "wb") as file:
        file.write(b"before ")
        file.flush()
        moepack_command(*command, "-", capture_output=False, stdout=file, stderr=subprocess.DEVNULL)
    assert similar((tmp_path / "redirected").read_bytes().removeprefix(b"before "), run.stdout)


def similar(one: bytes, other: bytes) -> bool:
    """Say whether two outputs are of the same kind: times that were measured differ."""
    return len(one) > 100 and one[:64] == other[:64]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("export", "gguf", "pack", "-o"), "cannot be written to standard output"),
        (("restore", "pack", "-o"), "a folder, not standard output"),
        (("pack", "source", "-o"), "a folder, not standard output"),
        (("index", "source", "-o"), "a folder, not standard output"),
        (("mount", "pack"), "a folder, not standard output"),
        (("inspect",), "not read from standard input"),
    ],
)
def test_what_cannot_be_a_stream_is_said(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*arguments, "-"]) == 2
    assert capsys.readouterr().err.startswith(f"error: -: {problem}\nhint: ")


def test_nothing_is_added_to_standard_output(tmp_path: Path, moepack_command: Run) -> None:
    run = moepack_command("trace", "import", TRACE, "-o", "-", "--append")
    assert (run.returncode, run.stdout) == (2, "")
    run = moepack_command("trace", "import", TRACE, "-o", tmp_path / "t", "--append", "--force")
    assert (run.returncode, "at once" in run.stderr) == (2, True)


def test_a_failure_puts_nothing_on_standard_output(tmp_path: Path, moepack_command: Run) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("layer,expert,count\n0,1,1\n0,x,1\n")
    for command in (("hotness",), ("trace", "import")):
        run = moepack_command(*command, bad, "-o", "-")
        assert (run.returncode, run.stdout) == (3, "")


def test_a_file_that_is_read_is_not_written_over(tmp_path: Path, moepack_command: Run) -> None:
    trace = Path(shutil.copy(TRACE, tmp_path / "trace.csv"))
    (tmp_path / "link").symlink_to(trace)
    for command in (("hotness",), ("trace", "import")):
        for target in (trace, tmp_path / "link"):
            run = moepack_command(*command, trace, "-o", target, "--force")
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
        (
            ("pack", "{model}", "-o", "{tmp}/p", "--layout", "-"),
            LAYOUT,
        ),
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
    moepack_command: Run,
) -> None:
    names = {"tmp": tmp_path, "model": first_shard("qwen3moe"), "pack": packs["qwen3moe"]}
    words = [word.format(**names) for word in arguments]
    run = moepack_command(*words, input=data.read_bytes(), text=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", [("trace", "stats"), ("pack", "{model}", "--hotness")])
def test_standard_input_may_be_a_file(
    command: tuple[str, ...], tmp_path: Path, moepack_command: Run
) -> None:
    words = [word.format(model=first_shard("qwen3moe")) for word in command]
    output = ("-o", tmp_path / "pack") if "pack" in words else ()
    with open(TRACE, "rb") as file:
        run = moepack_command(*words, "-", *output, stdin=file)
    assert run.returncode == 0, run.stderr


def test_hotness_from_standard_input_is_that_of_the_file(
    tmp_path: Path, moepack_command: Run
) -> None:
    for name, word, options in (("a", str(TRACE), {}), ("b", "-", {"input": TRACE.read_text()})):
        run = moepack_command("hotness", word, "-o", tmp_path / name, **options)
        assert run.returncode == 0, run.stderr
    one, other = ((tmp_path / name).read_text().splitlines() for name in ("a", "b"))
    assert [line for line in one if line[0] != "#"] == [line for line in other if line[0] != "#"]


def test_standard_input_is_read_once(moepack_command: Run, packs: dict[str, Path]) -> None:
    run = moepack_command("bench", packs["qwen3moe"], "--trace", "-", "--hotness", "-")
    assert (run.returncode, "only once" in run.stderr) == (2, True)


@pytest.mark.parametrize("word", ["inspect", "verify", "pack"])
def test_models_and_packs_are_not_read_from_standard_input(
    word: str, tmp_path: Path, moepack_command: Run
) -> None:
    more = ("-o", tmp_path / "p") if word == "pack" else ()
    run = moepack_command(word, "-", *more)
    assert (run.returncode, "standard input" in run.stderr) == (2, True)


def test_a_trace_is_not_written_in_the_place_of_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for force in (False, True):
        with pytest.raises(moepack.RequestError, match="not a file"):
            moepack.import_trace([str(TRACE)], tmp_path / "pipe", force=force)
    assert os.listdir(tmp_path) == ["pipe"]


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
        for force in ((), ("--force",)):
            code = main.run([*command, str(target), *force])
            said = capsys.readouterr().err
            assert (code, "--force" in said) == (0 if takes_streams else 2, False), said
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
    make_special(kind, tmp_path / shard)
    (tmp_path / "link").symlink_to(tmp_path / shard)
    pack = str(packs["qwen3moe"])
    for output in (
        ("restore", pack, "-o", str(tmp_path)),
        ("export", "gguf", pack, "-o", str(tmp_path / shard)),
        ("export", "gguf", pack, "-o", str(tmp_path / "link")),
    ):
        for force in ((), ("--force",), ("--resume",), ("--resume", "--force")):
            assert main.run([*output, *force]) == 2
            said = capsys.readouterr().err
            assert f"{kind.replace('drive', 'device')} has this name" in said
            assert "--force" not in said
    assert is_special(kind, tmp_path / shard)
    assert sorted(os.listdir(tmp_path)) == sorted([shard, "link"])


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


def test_standard_output_has_more_names(
    tmp_path: Path, packs: dict[str, Path], moepack_command: Run
) -> None:
    """Through a pipe and into a file that the shell opened, as for `-`."""
    command = ("hotness", TRACE, "-o")
    expected = moepack_command(*command, "-", "-q").stdout
    assert expected
    for name in ("/dev/stdout", "/dev/fd/1"):
        assert moepack_command(*command, name, "-q").stdout == expected
        with open(tmp_path / "redirected", "wb") as file:
            options: Any = {"capture_output": False, "stdout": file, "stderr": subprocess.PIPE}
            run = moepack_command(*command, name, **options)
        assert (run.returncode, (tmp_path / "redirected").read_text()) == (0, expected)
        assert "selections" in run.stderr
        run = moepack_command("export", "gguf", packs["qwen3moe"], "-o", name)
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


def test_the_library_writes_over_a_trace_when_it_is_told_to(tmp_path: Path) -> None:
    target = tmp_path / "trace"
    target.write_text("old")
    with pytest.raises(moepack.RequestError, match="exists already"):
        moepack.import_trace([str(TRACE)], target)
    assert moepack.import_trace([str(TRACE)], target, force=True).token_count == 192


def test_all_shards_of_the_fixture_are_still_there() -> None:
    assert all(Path(path).stat().st_size for path in shards_of("qwen3moe"))
