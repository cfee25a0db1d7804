"""The command `machine`: the file that it writes, what it prints, and what it refuses."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepack.cli.exit_codes import ExitCode
from moepack.machine.file import decode, read_machine
from tests.support.needs import require_disk

LITTLE = ("--seconds", "0")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def on_disk(packs: dict[str, Path]) -> Path:
    """Return a pack on a drive, which is measured."""
    require_disk(packs["qwen3moe"])
    return packs["qwen3moe"]


def test_the_machine_is_printed_and_what_is_not_known_is_noted(
    on_disk: Path, moepack_command: Command
) -> None:
    run = moepack_command("machine", on_disk, *LITTLE)
    assert run.returncode == 0, run.stderr
    machine = decode(run.stdout.encode(), "-")
    assert machine.memory.basis == "read"
    assert machine.drive is not None
    assert machine.drive.path == str(on_disk)
    assert "note: less than 1 GiB to read from" in run.stderr
    if not machine.gpus:
        assert "note: no GPU was found: " in run.stderr


def test_the_file_is_written_when_all_is_measured(
    on_disk: Path, moepack_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "machine.toml"
    run = moepack_command("machine", on_disk, *LITTLE, "-o", path)
    assert run.returncode == 0, run.stderr
    assert read_machine(path).drive is not None
    assert run.stdout.startswith("memory  ")
    assert "random reads with" in run.stdout
    before = path.read_bytes()
    refused = moepack_command("machine", on_disk, *LITTLE, "-o", path)
    assert refused.returncode == ExitCode.USAGE
    assert "exists already" in refused.stderr
    assert path.read_bytes() == before
    path.write_text("")
    forced = moepack_command("machine", on_disk, *LITTLE, "-o", path, "--force", "-q")
    assert (forced.stdout, forced.stderr) == ("", "")
    assert read_machine(path).drive is not None


def test_on_standard_output_the_file_is_alone(on_disk: Path, moepack_command: Command) -> None:
    run = moepack_command("machine", on_disk, *LITTLE, "-o", "-", "--json")
    assert decode(run.stdout.encode(), "-").drive is not None
    assert json.loads(run.stderr)["machine"]["memory"]["basis"] == "read"


def test_json_says_what_the_file_says(
    on_disk: Path, moepack_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "machine.toml"
    run = moepack_command("machine", on_disk, *LITTLE, "-o", path, "--json")
    facts = json.loads(run.stdout)
    machine = read_machine(path)
    assert facts["machine"]["memory"]["value"] == machine.memory.value
    assert machine.drive is not None
    assert facts["machine"]["drive"]["reads"] == [
        {"length": length, "depth": depth, "bandwidth": bandwidth._asdict()}
        for length, depth, bandwidth in machine.drive.reads
    ]
    assert any("less than 1 GiB" in note for note in facts["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--directory", "no/such"), "no/such: no such folder"),
        (("MODEL", "--directory", "."), ".: a model and a directory at once"),
        (("-o", "MODEL/machine.toml"), "a file of a pack is never written over"),
        (("-o", "no/such/machine.toml"), "no such folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, pack_copy: Path, moepack_command: Command
) -> None:
    (pack_copy / "machine.toml").touch()
    named = [argument.replace("MODEL", str(pack_copy)) for argument in arguments]
    run = moepack_command("machine", "--seconds", "600", *named)
    assert run.returncode == ExitCode.USAGE
    assert message in run.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_scratch_file(tmp_path: Path, number: signal.Signals) -> None:
    command: list[Any] = [sys.executable, "-m", "moepack", "machine", "-o", tmp_path / "m.toml"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("moepack-scratch-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert not list(tmp_path.iterdir())
