"""The command `place`: what it prints, takes and refuses."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moepack.cli.exit_codes import ExitCode
from moepack.machine.file import toml_text
from tests.support import large_models
from tests.support.machines import machine
from tests.support.models import first_shard

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return gpt-oss-120b with its real dimensions, without its bytes."""
    return large_models.write("gpt-oss-120b", tmp_path_factory.mktemp("large") / "model.gguf")


def test_it_prints_memories_and_a_command(moepack_command: Run, model: Path) -> None:
    done = moepack_command(
        "place", str(model), "--vram", "24GiB", "--ram", "64GiB", "--context", "8192"
    )
    assert done.returncode == 0
    assert "114.7B in experts, 1.5B dense" in done.stdout
    assert "5.1B are active in a token, but all take memory" in done.stdout
    assert (
        f"  llama-server -m {model} -ngl 999 --n-cpu-moe 26 -c 8192 -b 4096 -ub 4096\n"
        in done.stdout
    )
    assert "  experts: 15.8 GiB in VRAM, 41.1 GiB in memory" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "GiB" in line]
    assert ["memory", "64.0", "GiB"] in [row[:3] for row in rows]


def test_two_gpus_and_a_smaller_cache(moepack_command: Run, model: Path) -> None:
    gpus = ("--vram", "24GiB", "--vram", "24GiB", "--ram", "64GiB")
    done = moepack_command(
        "place", str(model), *gpus, "--cache-type", "q8_0,q4_0", "--engine", "ik_llama.cpp"
    )
    assert "-ts 25,12 " in done.stdout
    assert "-ctk q8_0 -ctv q4_0" in done.stdout
    assert "moe-cache" not in done.stdout


def test_json_has_it_all(moepack_command: Run, model: Path, tmp_path: Path) -> None:
    box = tmp_path / "machine.toml"
    box.write_text(toml_text(machine(memory=64, bandwidth=80, vram=24, vram_bandwidth=936)))
    done = moepack_command("place", str(model), "--machine", str(box), "--json")
    facts = json.loads(done.stdout)
    assert facts["engine"] == "llama.cpp"
    assert facts["context"] == 32768
    assert [device["name"] for device in facts["devices"]] == ["GPU", "memory"]
    speed = facts["option"]["forecast"]
    assert facts["option"]["cpu_layer_count"] == speed["cpu_layer_count"] > 0
    assert speed["lowest"] < speed["tokens_per_second"]
    assert speed["prompt"]["shortest"] < speed["prompt"]["seconds"] < speed["prompt"]["longest"]
    assert facts["pins"] is None
    text = moepack_command("place", str(model), "--machine", str(box)).stdout
    assert "  decode: " in text
    assert "  prompt: 1,000 tokens: " in text


def test_a_forecast_that_cannot_be_says_why(
    moepack_command: Run, model: Path, tmp_path: Path
) -> None:
    box = tmp_path / "machine.toml"
    box.write_text(toml_text(machine(memory=64, vram=24)))
    done = moepack_command("place", str(model), "--machine", str(box))
    assert "– tok/s: nothing is known of the bandwidth of VRAM and memory" in done.stdout


def test_pins_follow_the_trace(moepack_command: Run) -> None:
    source = first_shard("qwen3moe")
    trace = source.parent / "qwen3moe-trace.csv"
    small = ("--engine", "pack", "--context", "64", "--margin", "0", "--ram", "1700KiB")
    done = moepack_command("place", str(source), *small, "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "hits at this budget: the hottest that fit " in done.stdout
    assert "pinned; " in done.stdout or "pinned: " in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "it is not known how much memory there is"),
        (("--ram", "64XB"), "not a size"),
        (("--ram", "8GiB", "--vram", "2GiB"), "too little VRAM"),
        (("--ram", "8GiB"), "too little memory for this model"),
        (("--ram", "64GiB", "--cache-type", "q8_0,"), "not a type"),
        (("--ram", "64GiB", "--cache-type", "q9"), "not a type for a cache"),
        (("--machine", "none.toml"), "none.toml"),
        (("--ram", "64GiB", "--trace", "x.csv"), "places whole layers"),
    ],
)
def test_what_cannot_be_is_an_error(
    moepack_command: Run, model: Path, options: tuple[str, ...], message: str
) -> None:
    done = moepack_command("place", str(model), *options)
    assert done.returncode in (ExitCode.USAGE, ExitCode.MACHINE_FAULT)
    assert message in done.stderr


def test_a_missing_model_is_named(moepack_command: Run) -> None:
    assert moepack_command("place").returncode == ExitCode.USAGE
    assert moepack_command("place", "none.gguf", "--ram", "8GiB").returncode != 0
