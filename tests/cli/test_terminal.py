"""What is printed where: on terminals (real ones, of the system) and pipes, much and little."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

import moepack
from moepack.cli import main
from moepack.cli import progress as shown
from moepack.report import text
from moepack.report.facts import BlobFacts, PlacedPartFacts
from moepack.sizes import count_text
from tests.support.models import FIXTURES, REAL_MODELS, first_shard
from tests.support.terminals import MOEPACK, on_terminal

pytestmark = pytest.mark.long

Run = Callable[..., subprocess.CompletedProcess[str]]
TRACE = FIXTURES / "qwen3moe-trace.csv"
SLOW = """
import time
from moepack.cli.progress import progress
with progress(None, "packing") as advance:
    for _ in range(8):
        time.sleep(0.12)
        advance(1 << 20, 8 << 20)
print("done")
"""


@pytest.mark.parametrize("columns", [24, 40, 80, 200])
def test_a_bar_fits_the_terminal_and_is_gone_in_the_end(columns: int) -> None:
    written = on_terminal(sys.executable, "-c", SLOW, columns=columns)
    *frames, after = written.rstrip().split("\r")[1:]
    assert len(frames) >= 2
    assert max(map(len, frames)) < columns
    assert (frames[-1].strip(), after) == ("", "done")
    assert "\x1b" not in written
    assert re.search(r"packing: +\d+%\|", written)
    assert columns < 80 or re.search(
        r"█+[^|]*\| \d\.00M/8\.00M \[00:0\d<00:0\d, [\d.]+MiB/s\]", written
    )


def test_a_terminal_that_cannot_draw_gets_lines() -> None:
    assert "\x1b" not in on_terminal(sys.executable, "-c", SLOW, TERM="dumb")


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with shown.progress(None, "packing") as advance:
        assert advance is not None
        for _ in range(100):
            now[0] += 0.5
            advance(1 << 30, 100 << 30)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0] == "packing  20 %  20.0 GiB of 100.0 GiB  2.0 GiB/s  0:40 left"
    assert lines[4] == "packing 100 %  100.0 GiB of 100.0 GiB  2.0 GiB/s  0:00 left"


def test_what_is_counted_has_its_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for unit, state in (
        ("ms", "0:30 of 1:00"),
        ("tokens", "30,000 tokens of 60,000 tokens  1,000 tok/s"),
    ):
        with shown.progress(60_000, "working", unit) as advance:
            assert advance is not None
            now[0] += 30
            advance(30_000)
        assert capsys.readouterr().err == f"working  50 %  {state}  0:30 left\n"
    with shown.progress(None, "working", "tokens") as advance:
        assert advance is not None
        now[0] += 30
        advance(1_000)
    assert capsys.readouterr().err == "working 1,000 tokens\n"
    with shown.progress(None, "running", "runs") as advance:
        assert advance is not None
        now[0] += 30
        advance(1, 5)
    assert capsys.readouterr().err.startswith("running  20 %  1 run of 5 runs  ")
    with shown.progress(None, "packing") as advance:
        assert advance is not None
        now[0] += 30
        advance(0, 5)
    assert capsys.readouterr().err == "packing   0 %  0 B of 5 B\n", "no speed of nothing"


def test_quiet_commands_say_nothing_but_errors_and_json(
    tmp_path: Path, moepack_command: Run
) -> None:
    shard, pack = first_shard("qwen3moe"), tmp_path / "pack"
    at = ("--layer", "0", "--expert", "2")
    for command in (
        ("pack", shard, "-o", pack),
        ("verify", pack),
        ("extract", pack, *at, "-o", tmp_path / "part"),
        ("trace", "import", TRACE, "-o", tmp_path / "trace"),
        ("hotness", TRACE, "-o", tmp_path / "hot.csv"),
    ):
        run = moepack_command(*command, "-q")
        assert (run.returncode, run.stdout, run.stderr) == (0, "", ""), command
        again = moepack_command(*command, "-q")
        assert again.stderr.startswith("error: ") == (command[0] != "verify"), command
    assert json.loads(moepack_command("verify", pack, "--quiet", "--json").stdout)["passed"]
    with open(pack / "experts-00000.bin", "r+b") as file:
        file.write(b"\xff" * 64)
    damaged = moepack_command("verify", pack, "-q")
    assert (damaged.returncode, "digest" in damaged.stdout) == (5, True)


def test_more_is_said_where_that_is_wanted(pack_copy: Path, moepack_command: Run) -> None:
    run = moepack_command("verify", pack_copy, "-v")
    assert re.fullmatch(r"verifying: 1\.7 MiB in \d+(\.\d+)? s, [\d.]+ [MG]iB/s\n", run.stderr)
    for path in pack_copy.glob("*.bin"):
        if path.name != "index.bin":
            path.write_bytes(bytes(path.stat().st_size))
    few, all_ = moepack_command("verify", pack_copy), moepack_command("verify", pack_copy, "-v")
    assert "more: -v lists all" in few.stdout
    assert len(all_.stdout.splitlines()) > 90 > len(few.stdout.splitlines())
    both = moepack_command("verify", pack_copy, "-v", "-q")
    assert (both.returncode, "at once" in both.stderr) == (2, True)


def test_colours_are_for_terminals_that_want_them() -> None:
    command = (*MOEPACK, "inspect", "nothing.gguf")
    assert "\x1b[31m\x1b[1merror:\x1b[0m nothing.gguf" in on_terminal(*command)
    assert on_terminal(*command, NO_COLOR="1").startswith("error: nothing.gguf")
    assert on_terminal(*command, TERM="dumb").startswith("error: nothing.gguf")
    piped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert piped.stderr.startswith("error: nothing.gguf")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("inspect", str(first_shard("qwen3moe"))), ("extract",)]
)
def test_who_stops_reading_ends_the_program_without_a_word(
    arguments: tuple[str, ...], packs: dict[str, Path]
) -> None:
    if arguments == ("extract",):
        arguments = ("extract", str(packs["qwen3moe"]), "--layer=0", "--expert=2", "-o", "-", "-q")
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [*MOEPACK, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (141, "")


CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")


def test_nobody_has_to_give_a_program_its_streams(packs: dict[str, Path], tmp_path: Path) -> None:
    pack = str(packs["qwen3moe"])
    made = ("pack", str(first_shard("qwen3moe")), "-o", str(tmp_path / "pack"))
    for arguments in (("list", pack), made):
        assert subprocess.run([*CLOSED, *MOEPACK, *arguments], check=False).returncode == 0
    assert (tmp_path / "pack" / "manifest.json").exists()
    into = ("extract", pack, "--layer=0", "--expert=2", "-o", "-")
    closed = ("sh", "-c", 'exec "$@" >&-', "sh", *MOEPACK, *into)
    run = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (2, "error: -: standard output is closed\n")


# Completion, as click prints it for the shells, and in a real bash.


def completed(*words: str) -> list[str]:
    """Complete the last word; return the candidates with their kinds."""
    line = " ".join(("moepack", *words))
    names = {
        "_MOEPACK_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
    }
    code = "import sys; sys.argv[0] = 'moepack'; from moepack.__main__ import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | names, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("ins",), ["plain,inspect"]),
        (("trace", "con"), ["plain,concentration"]),
        (("pack", "--lay"), ["plain,--layout", "plain,--layers"]),
        (("pack", "--layout", ""), ["plain,hot-first", "plain,layers", "plain,natural"]),
        (("pack", "--layout", "h"), ["plain,hot-first"]),
        (("pack", "--layout", "./my"), ["file,./my"]),
        (("pack", "/models/qw"), ["file,/models/qw"]),
        (("pack", "x", "-o", "mo"), ["file,mo"]),
        (("verify", "p", "--source", "mo"), ["file,mo"]),
        (("trace", "stats", "--format", "colibri"), ["plain,colibri-usage", "plain,colibri-route"]),
        (("trace", "stats", "server."), ["file,server."]),
        (("bench", "p", "--backend", "ur"), ["plain,uring"]),
    ],
)  # fmt: skip
def test_words_are_completed(words: tuple[str, ...], candidates: list[str]) -> None:
    assert completed(*words) == candidates


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_what_the_document_says(tmp_path: Path) -> None:
    """The line of docs/commands.md is read by a bash, which then completes three lines."""
    document = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    (line,) = re.findall(r"^    (eval .*bash_source moepack\)\")", document, re.MULTILINE)
    command = tmp_path / "moepack"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moepack "$@"\n')
    command.chmod(0o755)
    (tmp_path / "my model.gguf").touch()
    script = f"""{line}
    complete_line() {{
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _moepack_completion "$1" "${{@: -1}}" "${{@: -2:1}}"
        printf '%s|' "${{COMPREPLY[@]}}"; echo
    }}
    complete_line moepack trace con
    complete_line moepack pack --layout h
    complete_line moepack pack my"""
    names = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    names["PYTHONPATH"] = str(Path(__file__).parents[2])
    bash = ["bash", "--noprofile", "--norc", "-c", script]
    run = subprocess.run(bash, cwd=tmp_path, env=names, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[:2] == ["concentration|", "hot-first|"], run.stderr


# What fits into 80 columns.


def test_the_help_of_each_command_fits_80_columns_and_its_example_a_line() -> None:
    for name, command in commands(main.cli, "moepack"):
        context = command.make_context(name, ["--help"], terminal_width=80, resilient_parsing=True)
        lines = command.get_help(context).splitlines()
        assert max(map(len, lines)) <= 80, name
        wanted = re.search(r"Example: (.*)", command.help or "")
        assert wanted is None or f"  Example: {wanted[1].strip()}" in lines, name
        assert not any(line.rstrip().endswith("-") for line in lines), name


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands and groups, with their names."""
    yield name, command
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from commands(inner, f"{name} {inner.name}")


@pytest.mark.parametrize("model", REAL_MODELS)
def test_tables_of_models_and_packs_fit_80_columns(
    model: str, packs: dict[str, Path], moepack_command: Run
) -> None:
    with moepack.open(packs[model]) as pack:
        layer = pack.shape.layers[0]
    for command in (
        ("inspect", first_shard(model)),
        ("inspect", packs[model]),
        ("locate", packs[model], "--layer", str(layer), "--expert", "1"),
        ("verify", packs[model]),
        ("pack", first_shard(model), "-o", packs[model].parent / "none", "--dry-run"),
    ):
        printed = moepack_command(*command).stdout
        tables = [line for line in printed.splitlines() if str(packs[model].parent) not in line]
        assert all(len(line) <= 80 for line in tables), printed


def test_places_in_large_packs_fit_80_columns() -> None:
    """With the longest common name of a part, and a file of 400 GiB."""
    offset, length = 400 << 30, 12_386_304
    digest = "xxh3:0123456789abcdef"
    path = Path("experts.bin")
    part = PlacedPartFacts(
        name="ffn_gate_up_exps.weight",
        type="IQ2_XXS",
        shape=(4096, 1536),
        path=path,
        offset=offset,
        offset_in_blob=0,
        stored_length=length,
        length=length,
        codec=None,
        digest=digest,
    )
    facts = BlobFacts(61, 255, "ffn_exps", path, offset, 2 * length, 15_615, 12_345_678, (part,))
    lines = text.blob(facts).text(80)
    assert max(map(len, lines.splitlines())) <= 80
    assert "left out" not in lines


def test_one_is_not_many() -> None:
    assert count_text(0, "file") == "0 files"
    assert count_text(1, "file") == "1 file"
    assert count_text(2_000, "file") == "2,000 files"


TALKING = """
import time
from moepack.cli.live_line import live_line
with live_line(is_wanted=True) as draw:
    for number in range(6):
        print(f"word{number}", end=" ", flush=True)
        time.sleep(0.12)
        draw(lambda: f"{number} words so far, and more to come")
    print()
print("done")
"""


def screen(written: str, rows: int) -> tuple[list[str], set[str]]:
    """Return what a terminal shows of text that uses one row at most, and all its last row said."""
    row = rf"\x1b\[{rows};1H\x1b\[2K([^\x1b]*)\x1b8"
    text = re.sub(r"\x1b(?:7|8|\[[\d;]*[rAK])", "", re.sub(row, "", written))
    return text.split(), set(re.findall(row, written))


@pytest.mark.parametrize("columns", [20, 80])
def test_a_live_line_stays_in_the_last_row(columns: int) -> None:
    written = on_terminal(sys.executable, "-c", TALKING, columns=columns, LINES="30")
    words, last = screen(written, 30)
    assert words == [*(f"word{number}" for number in range(6)), "done"]
    assert "" in last, "it is gone in the end"
    assert any("words so far" in text for text in last)
    assert max(map(len, last)) < columns
    assert written.index("\x1b[1;29r") < written.index("word0")
    assert written.index("word5") < written.index("\x1b[r"), "the terminal is whole again"


def test_a_live_line_is_lines_elsewhere_and_nothing_where_it_is_not_wanted() -> None:
    often = "from moepack.cli import live_line\nlive_line._SECONDS_BETWEEN_LINES = 0.2\n" + TALKING
    run = subprocess.run([sys.executable, "-c", often], capture_output=True, text=True, check=True)
    assert "\x1b" not in run.stdout + run.stderr
    assert run.stderr.count("words so far") >= 2
    unwanted = TALKING.replace("is_wanted=True", "is_wanted=False")
    assert "so far" not in on_terminal(sys.executable, "-c", unwanted, LINES="30")
