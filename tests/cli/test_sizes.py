"""Sizes as they are typed: each option says what half of something is, or that there is no half."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import moepack
from moepack.cli.main import cli
from moepack.cli.parameters import Length
from moepack.machine.memory_limits import read_memory
from tests.support.models import first_shard

Run = Callable[..., subprocess.CompletedProcess[str]]
MODEL = first_shard("qwen3moe")


def memory_option(command: str) -> Length:
    """Return the type of a command's option --memory."""
    (option,) = (one for one in cli.commands[command].params if one.name == "memory")
    assert isinstance(option.type, Length)
    return option.type


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_half_of_memory_is_half_of_what_programs_may_have(command: str) -> None:
    length = memory_option(command)
    context = click.Context(cli.commands[command])
    assert length.convert("50%", None, context) == int(read_memory().value) // 2
    assert length.convert("8g", None, context) == length.convert("8 GiB", None, context) == 8 << 30


def test_a_share_of_the_experts_is_known_with_the_model(
    packs: dict[str, Path], moepack_command: Run
) -> None:
    pack = packs["qwen3moe"]
    everything = moepack_command("list", pack, "--hottest", "100%", "--csv")
    assert everything.returncode == 2, "it has no hotness"
    machine = ("--json", "--dense-in-memory")
    budgets = []
    for size in ("50%", "496KiB"):
        path = pack.parent / "machine.toml"
        path.write_text('[memory]\nlength = "64GB"\nbandwidth = "50 GB/s"\n')
        told = moepack_command("forecast", pack, "--machine", path, "--budget", size, *machine)
        assert told.returncode == 0, told.stderr
        budgets.append(json.loads(told.stdout)["forecasts"][0]["budget_length"])
    assert budgets[0] == moepack.shape_of(pack).expert_length // 2
    assert budgets[1] == 496 << 10


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (("run", MODEL, "--memory", "8"), "--memory: 8 bytes are too few", "8GiB?"),
        (("run", MODEL, "--memory", "24"), "--memory: 24 bytes are too few", "24GiB?"),
        (("serve", MODEL, "--pin", "512"), "--pin: 512 bytes are too few", "512MiB?"),
        (("run", MODEL, "--memory", "1,5GiB"), "--memory: not a size", "with a point: 1.5GiB"),
        (("run", MODEL, "--memory", "150%"), "--memory: more than all", ""),
        (("place", MODEL, "--ram", "50%"), "--ram: not a size", "a percentage says nothing here"),
        (("place", MODEL, "--vram", "24", "--ram", "64G"), "--vram: 24 bytes", "24GiB?"),
        (("mirror", MODEL, "x", "--hottest", "8"), "--hottest: 8 bytes are too few", "8GiB?"),
    ],
)
def test_what_is_surely_a_mistake_is_answered_with_what_to_type(
    arguments: tuple[object, ...], problem: str, hint: str, moepack_command: Run
) -> None:
    run = moepack_command(*arguments)
    assert run.returncode == 2, run.stdout
    error, *hints = run.stderr.splitlines()
    assert error.startswith(f"error: {problem}")
    assert hint in " ".join(hints)
