"""Output on terminals (real ones, of the system) and pipes, quiet and verbose; completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.cli.words.front import commands_below
from tests.support.children import MOEPACK
from tests.support.models import FIXTURES, first_shard
from tests.support.terminals import on_terminal
from tests.support.warm_command import Run

pytestmark = pytest.mark.long

TRACE = FIXTURES / "qwen3moe-trace.csv"


def test_quiet_commands_say_nothing_but_errors_and_json(tmp_path: Path, cli: Run) -> None:
    shard, pack = first_shard("qwen3moe"), tmp_path / "pack"
    at = ("--layer", "0", "--expert", "2")
    for command in (
        ("pack", shard, "-o", pack),
        ("verify", pack),
        ("extract", pack, *at, "-o", tmp_path / "part"),
        ("trace", "import", TRACE, "-o", tmp_path / "trace"),
        ("hotness", TRACE, "-o", tmp_path / "hot.csv"),
    ):
        run = cli(*command, "-q")
        assert (run.returncode, run.stdout, run.stderr) == (0, "", ""), command
        again = cli(*command, "-q")
        assert again.stderr.startswith("error: ") == (command[0] not in ("pack", "verify")), command
    assert json.loads(cli("verify", pack, "--quiet", "--json").stdout)["passed"]
    with open(pack / "experts-00000.bin", "r+b") as file:
        file.write(b"\xff" * 64)
    damaged = cli("verify", pack, "-q")
    assert (damaged.returncode, "digest" in damaged.stdout) == (5, True)


def test_more_is_said_where_that_is_wanted(pack_copy: Path, cli: Run) -> None:
    run = cli("verify", pack_copy, "-v")
    assert re.fullmatch(r"verifying: 1\.7 MiB in \d+(\.\d+)? s, [\d.]+ [MG]iB/s\n", run.stderr)
    for path in pack_copy.glob("*.bin"):
        if path.name != "index.bin":
            path.write_bytes(bytes(path.stat().st_size))
    few, all_ = cli("verify", pack_copy), cli("verify", pack_copy, "-v")
    assert "more: -v lists all" in few.stdout
    assert len(all_.stdout.splitlines()) > 90 > len(few.stdout.splitlines())


def test_colours_are_for_terminals_that_want_them() -> None:
    command = (*MOEPACK, "inspect", "nothing.gguf")
    assert "\x1b[31m\x1b[1merror:\x1b[0m nothing.gguf" in on_terminal(*command)
    assert on_terminal(*command, NO_COLOR="1").startswith("error: nothing.gguf")


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


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("ins",), ["plain,inspect"]),
        (("pack", "--lay"), ["plain,--layout", "plain,--layers"]),
        (("pack", "--layout", ""), ["plain,hot-first", "plain,layers", "plain,natural"]),
        (("pack", "--layout", "./my"), ["file,./my"]),
        (("pack", "/models/qw"), ["file,/models/qw"]),
        (("pack", "x", "-o", "mo"), ["file,mo"]),
        (("trace", "stats", "--format", "c"), ["plain,call-csv", "plain,counts"]),
        (("run", "p", "--backend", "ur"), ["plain,uring"]),
    ],
)  # fmt: skip
def test_words_are_completed(
    words: tuple[str, ...],
    candidates: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_MOEPACK_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(("moepack", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert main.run([]) == 0
    assert capsys.readouterr().out.splitlines() == candidates


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_what_the_document_says(tmp_path: Path) -> None:
    """The line of docs/commands/common.md is read by a bash, which then completes one."""
    document = (Path(__file__).parents[2] / "docs" / "commands" / "common.md").read_text()
    (line,) = re.findall(r"^    (eval .*bash_source moepack\)\")", document, re.MULTILINE)
    command = tmp_path / "moepack"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moepack "$@"\n')
    command.chmod(0o755)
    script = f"""{line}
    complete_line() {{
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _moepack_completion "$1" "${{@: -1}}" "${{@: -2:1}}"
        printf '%s|' "${{COMPREPLY[@]}}"; echo
    }}
    complete_line moepack pack --layout h"""
    names = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    names["PYTHONPATH"] = str(Path(__file__).parents[2])
    bash = ["bash", "--noprofile", "--norc", "-c", script]
    run = subprocess.run(bash, cwd=tmp_path, env=names, capture_output=True, text=True, check=True)
    assert run.stdout == "hot-first|\n", run.stderr


# What fits into 80 columns.


def test_the_help_of_each_command_fits_80_columns_and_its_example_a_line() -> None:
    for name, command in commands_below(main.cli):
        context = command.make_context(
            f"moepack {name}", ["--help"], terminal_width=80, resilient_parsing=True
        )
        lines = command.get_help(context).splitlines()
        assert max(map(len, lines)) <= 80, name
        example = re.search(r"Example: (.*)", command.help or "")
        assert example is None or f"  Example: {example[1].strip()}" in lines, name
        assert not any(line.rstrip().endswith("-") for line in lines), name
