"""The command `machine`: the file that it writes, what it prints, and what it refuses."""

import json
import signal
from pathlib import Path

import pytest

from moepack.cli.shared.exit_codes import ExitCode
from moepack.planning.machine.file import decode, read_machine
from tests.support.children import MOEPACK, Piped, wait_until
from tests.support.needs import require_disk
from tests.support.warm_command import Run

LITTLE = ("--seconds", "0")


@pytest.fixture
def on_disk(packs: dict[str, Path]) -> Path:
    """Return a pack on a drive, which is measured."""
    require_disk(packs["qwen3moe"])
    return packs["qwen3moe"]


def test_the_machine_is_printed_and_what_is_not_known_is_noted(on_disk: Path, cli: Run) -> None:
    run = cli("machine", on_disk, *LITTLE)
    assert run.returncode == 0, run.stderr
    machine = decode(run.stdout.encode(), "-")
    assert machine.memory.basis == "read"
    assert machine.drive is not None
    assert machine.drive.path == str(on_disk)
    assert "note: less than 1 GiB to read from" in run.stderr
    assert machine.gpus or "note: no GPU was found: " in run.stderr


def test_the_file_is_written_when_all_is_measured(on_disk: Path, cli: Run, tmp_path: Path) -> None:
    """And JSON has the same."""
    path = tmp_path / "machine.toml"
    path.write_text("before")
    refused = cli("machine", on_disk, *LITTLE, "-o", path)
    assert refused.returncode == ExitCode.USAGE
    assert "exists already" in refused.stderr
    assert path.read_text() == "before"
    run = cli("machine", on_disk, *LITTLE, "-o", path, "--force", "--json", "-q")
    assert (run.returncode, run.stderr) == (0, "")
    facts, machine = json.loads(run.stdout), read_machine(path)
    assert facts["machine"]["memory"]["value"] == machine.memory.value
    assert machine.drive is not None
    assert facts["machine"]["drive"]["reads"] == [
        {"length": length, "depth": depth, "bandwidth": bandwidth._asdict()}
        for length, depth, bandwidth in machine.drive.reads
    ]
    assert any("less than 1 GiB" in note for note in facts["notes"])


def test_on_standard_output_the_file_is_alone(on_disk: Path, cli: Run) -> None:
    run = cli("machine", on_disk, *LITTLE, "-o", "-")
    assert decode(run.stdout.encode(), "-").drive is not None
    assert "\nmemory  " in f"\n{run.stderr}"
    assert "random reads with" in run.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_no_scratch_file(tmp_path: Path, number: signal.Signals) -> None:
    with Piped(*MOEPACK, "machine", "-o", tmp_path / "m.toml") as process:
        wait_until(lambda: list(tmp_path.glob("moepack-scratch-*")))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert not list(tmp_path.iterdir())
