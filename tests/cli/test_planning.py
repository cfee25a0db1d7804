"""The commands `doctor`, `machine`, `place` and `forecast`: what they print, write and refuse."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moepack.cli.shared.exit_codes import ExitCode
from moepack.planning.footprint.model import footprint_of
from moepack.planning.machine.file import decode, read_machine
from tests.support.children import MOEPACK, Piped, wait_until
from tests.support.machines import write_machine
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_library, require_disk
from tests.support.warm_command import Run, json_of

LITTLE = ("--seconds", "0")


@pytest.fixture
def on_disk(packs: dict[str, Path]) -> Path:
    """Return a pack on a drive, which is measured."""
    require_disk(packs["qwen3moe"])
    return packs["qwen3moe"]


@needs_library
def test_the_machine_is_printed_and_what_is_not_known_is_noted(on_disk: Path, cli: Run) -> None:
    run = cli("machine", on_disk, *LITTLE)
    assert run.returncode == 0, run.stderr
    machine = decode(run.stdout.encode(), "-")
    assert machine.memory.basis == "read"
    assert machine.drive is not None
    assert machine.drive.path == str(on_disk)
    assert "note: less than 1 GiB to read from" in run.stderr
    assert machine.gpus or "note: no GPU was found: " in run.stderr


@needs_library
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


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interruption_leaves_no_scratch_file(tmp_path: Path, number: signal.Signals) -> None:
    with Piped(*MOEPACK, "machine", "-o", tmp_path / "m.toml") as process:
        wait_until(lambda: list(tmp_path.glob("moepack-scratch-*")))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert not list(tmp_path.iterdir())


@needs_library
def test_json_has_findings_and_a_prognosis(on_disk: Path, cli: Run) -> None:
    facts = json_of(cli("doctor", on_disk, *LITTLE, "--prompt", "300", "--json"))
    assert {"memory", "drive", "processors"} <= {one["name"] for one in facts["findings"]}
    assert {one["verdict"] for one in facts["findings"]} <= {"fine", "limit", "problem", "unknown"}
    assert facts["prognosis"]["forecast"]["forecasts"][0]["prompt"]["token_count"] == 300
    assert facts["machine"]["memory"]["basis"] == "read"


def test_it_prints_memories_and_a_command(cli: Run, gpt_oss: Path) -> None:
    words = "--vram 24GiB --ram 64GiB --context 8192 --memory-bandwidth 80GB/s"
    done = cli("place", gpt_oss, *words.split(), "--vram-bandwidth", "936GB/s")
    assert done.returncode == 0
    assert "114.7B in experts, 1.5B dense" in done.stdout
    assert "5.1B are active in a token, but all take memory" in done.stdout
    assert (
        f"  llama-server -m {gpt_oss} -ngl 999 --n-cpu-moe 26 -c 8192 -b 4096 -ub 4096\n"
        in done.stdout
    )
    assert "  experts: 15.8 GiB in VRAM, 41.1 GiB in memory\n  decode: " in done.stdout
    assert "\n  prompt: 1,000 tokens: " in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "GiB" in line]
    assert ["memory", "64.0", "GiB"] in [row[:3] for row in rows]


MODEL = first_shard("qwen3moe")
TRACE = FIXTURES / "qwen3moe-trace.csv"


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """Write a machine with a GPU and a drive."""
    figures = {"vram": 24, "vram_bandwidth": 936, "bandwidth": 40, "drive": 3}
    return write_machine(tmp_path / "box.toml", **figures)


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    """Write a machine without a GPU."""
    return write_machine(tmp_path / "no-gpu.toml", bandwidth=40, drive=3)


def lines_of(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def receipt(path: Path, **values: Any) -> Path:
    length = footprint_of(MODEL).weights.length
    entry = {"backends": "CUDA", "model_size": length, "n_gpu_layers": 99, "n_cpu_moe": 1}
    path.write_text(json.dumps([{**entry, "n_prompt": 0, "n_gen": 128, "avg_ts": 2900, **values}]))
    return path


def test_one_forecast_in_words(box: Path, tmp_path: Path, cli: Run) -> None:
    paths = receipt(tmp_path / "one.json"), receipt(tmp_path / "cpu.json", n_gpu_layers=0)
    arguments = ("--n-cpu-moe", "1", "--receipt", paths[0], "--receipt", paths[1])
    lines = lines_of(cli("forecast", MODEL, "--machine", box, *arguments))
    assert lines[0].startswith(f"{MODEL} on box: 1.0 MiB of experts, 335.1 KiB dense; a token ")
    start = "--n-cpu-moe 1 (experts in memory, the rest in VRAM): 2,910 tok/s, "
    assert lines[2].startswith(start)
    assert lines[2].endswith("; at most 293,000, if every bandwidth were reached")
    assert [line.split()[0] for line in lines[3:6]] == ["layers", "VRAM", "memory"]
    assert lines[3].endswith("takes longest")
    assert " of 871.7 GiB/s typed  " in lines[4]
    assert " of 37.3 GiB/s typed  " in lines[5]
    assert lines[6].startswith("prompt of 1,000 tokens: ")
    assert "to the first token" in lines[6]
    assert lines[6].endswith(
        "; 1 sweep of up to 1,000 tokens; computing limits it to 19,000,000 tok/s"
    )
    assert lines[7].startswith("takes ")
    assert lines[7].endswith(" of memory, which fits")
    assert lines[8] == "nine of ten runs are in the range; evidence: 1 receipt"
    assert lines[9].startswith(f"receipt {paths[0]}, entry 1: 2,900 tok/s (n_gen, ")
    refused = f"receipt {paths[1]}, entry 1: 2,900 tok/s, not used: it ran in another mode ("
    assert lines[10].startswith(refused)
    assert len(lines) == 11


def test_a_forecast_from_the_drive_in_words(no_gpu: Path, cli: Run) -> None:
    arguments = ("--machine", no_gpu, "--budget", "512KiB")
    lines = lines_of(cli("forecast", MODEL, *arguments))
    words = "experts from the drive, the rest in memory; a cache of 512.0 KiB: "
    assert lines[2].startswith(words)
    assert any(
        line.endswith(" of the drive (from: curve of Qwen3-30B-A3B)") and " of lookups hit" in line
        for line in lines
    )
    assert any(line.startswith("note: without a trace, misses follow the curve") for line in lines)
    assert lines[-2] == "a measured run of this model here makes it more certain"
    assert lines[-1].startswith("next: moepack run ")


def test_a_table_of_layers(box: Path, cli: Run) -> None:
    lines = lines_of(cli("forecast", MODEL, "--machine", box, "--all"))
    assert lines[2].split() == [
        *("--n-cpu-moe", "VRAM", "memory", "tok/s", "from", "to", "at", "most", "longest"),
        *("1,000", "tokens", "from", "to"),
    ]
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    assert lines[6] == ""


def test_a_table_of_budgets(no_gpu: Path, cli: Run) -> None:
    arguments = ("forecast", MODEL, "--machine", no_gpu, "--all", "--trace", TRACE)
    lines = lines_of(cli(*arguments))
    assert lines[2].split()[:5] == ["budget", "hits", "read", "a", "token"]
    assert len(lines[3:15]) == 12
    assert [line.split()[1] for line in lines[3:15]] == ["KiB"] * 11 + ["MiB"]
    assert not any(line.startswith("note: ") for line in lines)
    assumed = lines_of(cli(*arguments[:-2]))
    assert any(
        line.startswith("note: without a trace, misses follow the curve") for line in assumed
    )


def test_json_has_all_fields(no_gpu: Path, cli: Run) -> None:
    arguments = ("forecast", MODEL, "--machine", no_gpu, "--budget", "512KiB", "--trace", TRACE)
    facts = json_of(cli(*arguments, "--json"))
    assert (facts["model"], facts["machine"], facts["context"]) == (str(MODEL), "box", 4096)
    (one,) = facts["forecasts"]
    assert (one["kind"], one["budget_length"], one["cpu_layer_count"]) == ("stream", 1 << 19, None)
    assert (one["vram_length"], one["fits"], one["warnings"]) == (0, True, [])
    layers, _, _, drive = one["terms"]
    assert (layers["name"], layers["count"], layers["length"]) == ("layers", 2, None)
    assert drive["length"] == one["missed_length"] > 0
    assert (drive["bandwidth"], drive["basis"], drive["count"]) == (3e9, "typed", None)


@pytest.mark.parametrize("options", [("--all",), ()])
def test_a_picture(options: tuple[str, ...], no_gpu: Path, tmp_path: Path, cli: Run) -> None:
    target = tmp_path / "picture.svg"
    run = cli("forecast", MODEL, "--machine", no_gpu, *options, "--plot", target)
    assert run.returncode == 0, run.stderr
    assert "<svg" in target.read_text()


def test_the_machine_may_come_from_standard_input(box: Path, cli: Run) -> None:
    run = cli("forecast", MODEL, "--machine", "-", input=box.read_text())
    assert lines_of(run)[0].startswith(f"{MODEL} on box: ")


def test_machines_are_compared_in_one_table(cli: Run, gpt_oss: Path) -> None:
    names = ("preset:rtx-4090-64", "preset:strix-halo-128")
    machines = [word for name in names for word in ("--machine", name)]
    done = cli("forecast", str(gpt_oss), *machines)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("RTX", "Strix"))]
    assert [row.split("  ")[0] for row in rows] == ["RTX 4090, 64 GB", "Strix Halo, 128 GB"]
    facts = json_of(cli("forecast", str(gpt_oss), *machines, "--ram", "32GiB", "--json"))
    assert [one["machine"] for one in facts["machines"]] == [row.split("  ")[0] for row in rows]
    (speed,) = facts["machines"][1]["forecast"]["forecasts"]
    assert speed["kind"] == "gpu-stream", "with less memory it does not fit"


def test_figures_alone_are_a_machine(cli: Run, gpt_oss: Path) -> None:
    figures = ("--ram", "32GiB", "--memory-bandwidth", "89.6GB/s", "--drive-speed", "7GB/s")
    done = cli("forecast", str(gpt_oss), *figures)
    assert "experts from the drive, the rest in memory" in done.stdout, done.stderr
    with_gpu = ("--vram", "24GiB", "--vram-bandwidth", "1008GB/s")
    assert "the rest in VRAM" in cli("forecast", str(gpt_oss), *figures, *with_gpu).stdout


def test_presets_are_listed_with_their_figures(cli: Run) -> None:
    done = cli("machine", "--presets")
    row = next(line for line in done.stdout.splitlines() if line.startswith("dgx-spark"))
    assert row.split()[1:] == ["119.0", "GiB", "273", "GB/s", "119.0", "GiB", "unified", "–"]
    names = [one["name"] for one in json_of(cli("machine", "--presets", "--json"))["presets"]]
    assert names == sorted(names)
    assert 8 <= len(names) <= 12


def test_the_doctor_looks_at_a_machine_that_is_not_this_one(cli: Run, gpt_oss: Path) -> None:
    done = cli("doctor", str(gpt_oss), "--as", "preset:rtx-4090-64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [
        *("memory", "memory bandwidth"),
        *("drive", "GPU"),
    ]
    assert f"{gpt_oss} on RTX 4090, 64 GB: " in done.stdout
    assert "    twice as much VRAM: " in done.stdout
    small = cli("doctor", str(gpt_oss), "--as", "preset:steam-deck", "--json")
    assert json.loads(small.stdout)["prognosis"]["forecast"]["machine"] == "Steam Deck OLED"
