"""The command line: what it prints, its JSON, its exit codes, and sizes as they are typed."""

import json
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from moepack.cli import main
from moepack.host.memory_limits import read_memory
from tests.support.gguf_builder import moe
from tests.support.models import first_shard
from tests.support.warm_command import Run


def test_inspect_describes_a_source(cli: Run) -> None:
    body = json.loads(cli("inspect", first_shard("deepseek2"), "--json").stdout)
    assert body["architecture"] == "deepseek2"
    assert len(body["shards"]) == 6
    assert body["layers"] == [2, 3]
    assert body["experts_used"] == 4
    (first, *_) = body["families"]
    assert first["expert_count"] == 16
    parts = {part["name"]: part for part in first["parts"]}
    assert parts["ffn_down_exps.weight"]["type"] == "IQ4_NL"
    assert parts["ffn_down_exps.weight"]["shape"] == [32, 256]
    assert first["bytes_per_expert"] == sum(part["length"] for part in first["parts"])
    expert_elements = 2 * 16 * 3 * 32 * 256
    assert body["parameters"]["expert"] == expert_elements
    inactive = expert_elements * 12 // 16 + body["parameters"]["embedding"]
    assert body["parameters"]["active"] == body["parameters"]["total"] - inactive


def test_extract_gives_exactly_the_parts_bytes(
    packs: dict[str, Path], tmp_path: Path, cli: Run
) -> None:
    packed = packs["qwen3moe"]
    at = ("--layer", "1", "--expert", "5")
    where = json.loads(cli("locate", packed, *at, "--json").stdout)
    data = Path(where["path"]).read_bytes()
    for part in where["parts"]:
        target = tmp_path / "part.bin"
        cli("extract", packed, *at, "--part", part["name"], "-o", target, "--force")
        assert target.read_bytes() == data[part["offset"] : part["offset"] + part["length"]]
    run = cli("extract", packed, *at, "-o", "-", text=False)
    assert run.stdout == data[where["offset"] : where["offset"] + where["length"]]


def test_prediction_layers_are_packed_unless_left_out(tmp_path: Path, cli: Run) -> None:
    builder = moe((0, 1, 2)).put("qwen3moe.nextn_predict_layers", "u32", 1)
    path = builder.write(tmp_path / "m.gguf")
    assert json.loads(cli("inspect", path, "--json").stdout)["mtp_layers"] == [2]
    for option, layers in (((), [0, 1, 2]), (("--no-mtp",), [0, 1])):
        target = tmp_path / f"pack{len(layers)}"
        run = cli("pack", path, "-o", target, "--json", *option)
        assert json.loads(run.stdout)["layers"] == layers
        assert cli("verify", target, "--source", path).returncode == 0


def test_a_full_standard_output_is_no_traceback(packs: dict[str, Path], cli: Run) -> None:
    with open("/dev/full", "w") as full:
        streams: Any = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        run = cli("inspect", packs["qwen3moe"], **streams)
    assert run.returncode == 6
    assert "Traceback" not in run.stderr


def test_a_pack_that_is_too_small_for_a_picture_is_measured_all_the_same(
    tmp_path: Path, cli: Run
) -> None:
    assert cli("pack", moe().write(tmp_path / "m.gguf"), "-o", tmp_path / "p")
    little = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0.001")
    run = cli("bench", tmp_path / "p", *little, "--plot", tmp_path / "s.svg")
    assert (run.returncode, "nothing is drawn" in run.stderr) == (0, True), run.stderr
    assert not (tmp_path / "s.svg").exists()


@pytest.mark.parametrize("has_source", [False, True])
def test_bench_says_early_that_nothing_is_compared(
    has_source: bool, packs: dict[str, Path], cli: Run
) -> None:
    source = ("--source", first_shard("qwen3moe")) if has_source else ()
    little = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0")
    run = cli("bench", packs["qwen3moe"], *source, *little, "--experts-used", "2")
    assert run.returncode == 0, run.stderr
    assert "2 experts a layer" in run.stdout
    assert ("nothing to compare the pack with" in run.stderr) != has_source


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_half_of_memory_is_half_of_what_programs_may_have(command: str) -> None:
    (length,) = (one.type for one in main.cli.commands[command].params if one.name == "memory")
    context = click.Context(main.cli.commands[command])
    assert length.convert("50%", None, context) == read_memory() // 2
    assert length.convert("8g", None, context) == length.convert("8 GiB", None, context) == 8 << 30
