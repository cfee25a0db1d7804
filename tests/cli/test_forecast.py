"""The command `forecast`: what it prints, draws, takes and refuses."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepack.cli.exit_codes import ExitCode
from moepack.footprint.weights import weights_of
from moepack.forecasting.published import FormulaParameters
from moepack.format import manifest
from moepack.machine.file import toml_text
from tests.support.machines import machine
from tests.support.models import FIXTURES, first_shard

Run = Callable[..., subprocess.CompletedProcess[str]]
MODEL = first_shard("qwen3moe")
TRACE = FIXTURES / "qwen3moe-trace.csv"
FORMULA = ("forecast", "--formula", "published")


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """Write a machine with a GPU and a drive."""
    path = tmp_path / "box.toml"
    path.write_text(toml_text(machine(vram=24, vram_bandwidth=936, bandwidth=40, drive=3)))
    return path


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    """Write a machine without a GPU."""
    path = tmp_path / "no-gpu.toml"
    path.write_text(toml_text(machine(bandwidth=40, drive=3)))
    return path


def body(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def lines_of(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def receipt(path: Path, **values: Any) -> Path:
    length = weights_of(MODEL).length
    known = {"backends": "CUDA", "model_size": length, "n_gpu_layers": 99, "n_cpu_moe": 1}
    path.write_text(json.dumps([{**known, "n_prompt": 0, "n_gen": 128, "avg_ts": 2900, **values}]))
    return path


def test_one_forecast_in_words(box: Path, tmp_path: Path, moepack_command: Run) -> None:
    paths = receipt(tmp_path / "one.json"), receipt(tmp_path / "cpu.json", n_gpu_layers=0)
    arguments = ("--n-cpu-moe", "1", "--receipt", paths[0], "--receipt", paths[1])
    lines = lines_of(moepack_command("forecast", MODEL, "--machine", box, *arguments))
    assert lines[0] == (
        f"{MODEL} on box: 1.0 MiB of experts, 335.1 KiB dense; a token reads 256.0 KiB of "
        "experts, and 263.3 KiB besides"
    )
    assert lines[1] == ""
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
    assert lines[8] == "the range holds nine of ten runs; it stands on 1 receipt"
    assert lines[9].startswith(f"receipt {paths[0]}, entry 1: 2,900 tok/s (n_gen, ")
    refused = f"receipt {paths[1]}, entry 1: 2,900 tok/s, not used: it ran another way ("
    assert lines[10].startswith(refused)
    assert lines[11] == "a run of this model here says it better"
    assert lines[12].startswith("next: llama-bench -m ")
    assert len(lines) == 13


def test_a_forecast_from_the_drive_in_words(no_gpu: Path, moepack_command: Run) -> None:
    arguments = ("--machine", no_gpu, "--budget", "512KiB", "--working-set", "20,4")
    lines = lines_of(moepack_command("forecast", MODEL, *arguments))
    words = "experts from the drive, the rest in memory; a cache of 512.0 KiB: "
    assert lines[2].startswith(words)
    assert any(
        line.endswith(" of the drive (from: working set)") and " of lookups hit" in line
        for line in lines
    )
    assert any(line.startswith("note: the formula of U and D says ") for line in lines)


def test_a_table_of_layers(box: Path, moepack_command: Run) -> None:
    lines = lines_of(moepack_command("forecast", MODEL, "--machine", box, "--all"))
    assert lines[2].split() == [
        *("--n-cpu-moe", "VRAM", "memory", "tok/s", "from", "to", "at", "most", "longest"),
        *("1,000", "tokens", "from", "to"),
    ]
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    assert lines[6] == ""


def test_a_table_of_budgets(no_gpu: Path, moepack_command: Run) -> None:
    arguments = ("forecast", MODEL, "--machine", no_gpu, "--all", "--trace", TRACE)
    lines = lines_of(moepack_command(*arguments))
    assert lines[2].split()[:5] == ["budget", "hits", "read", "a", "token"]
    assert len(lines[3:15]) == 12
    assert [line.split()[1] for line in lines[3:15]] == ["KiB"] * 11 + ["MiB"]
    assert not any(line.startswith("note: ") for line in lines)
    assumed = lines_of(moepack_command(*arguments[:-2]))
    assert any(line.startswith("note: without a trace an even router") for line in assumed)


def test_json_has_all_fields(no_gpu: Path, moepack_command: Run) -> None:
    arguments = ("forecast", MODEL, "--machine", no_gpu, "--budget", "512KiB", "--trace", TRACE)
    facts = body(moepack_command(*arguments, "--json"))
    assert (facts["model"], facts["machine"], facts["context"]) == (str(MODEL), "box", 4096)
    (one,) = facts["forecasts"]
    assert (one["kind"], one["budget_length"], one["cpu_layer_count"]) == ("stream", 1 << 19, None)
    assert one["lowest"] < one["tokens_per_second"] < one["highest"] <= one["ceiling"]
    assert one["misses_from"] == "trace"
    assert (one["vram_length"], one["fits"], one["warnings"]) == (0, True, [])
    assert [term["name"] for term in one["terms"]] == ["layers", "memory", "drive"]
    drive = one["terms"][2]
    assert drive["length"] == one["missed_length"] > 0
    assert (drive["bandwidth"], drive["basis"], drive["count"]) == (3e9, "typed", None)
    assert one["terms"][0]["count"] == 2
    assert one["terms"][0]["length"] is None


def test_what_is_not_known_is_null_and_a_dash(tmp_path: Path, moepack_command: Run) -> None:
    path = tmp_path / "bare.toml"
    path.write_text('[memory]\nlength = "64 GiB"\n')
    arguments = ("forecast", MODEL, "--machine", path)
    (one,) = body(moepack_command(*arguments, "--json"))["forecasts"]
    for name in ("tokens_per_second", "lowest", "highest", "ceiling", "binding", "hit_rate"):
        assert one[name] is None
    assert one["reason"] == "nothing is known of the bandwidth of memory"
    assert f"– tok/s: {one['reason']}" in lines_of(moepack_command(*arguments))[2]


@pytest.mark.parametrize(
    ("options", "speed"),
    [
        ((), "2.9715"),
        (("--ram_bytes", str(256 << 30)), "5.1360"),
        (("--ssds_in_raid", "4"), "5.2723"),
    ],
)
def test_the_published_formula(options: tuple[str, ...], speed: str, moepack_command: Run) -> None:
    (line,) = lines_of(moepack_command(*FORMULA, *options))
    assert line.startswith(f"{speed} tok/s by the formula of estimate_speed.py: dense 22.0 ms, ")
    facts = body(moepack_command(*FORMULA, *options, "--json"))
    assert f"{facts['tokens_per_second']:.4f}" == speed
    terms = ("dense_seconds", "memory_seconds", "drive_seconds")
    assert sum(facts[term] for term in terms) == pytest.approx(1 / facts["tokens_per_second"])


def test_the_published_formula_has_the_options_of_its_script(moepack_command: Run) -> None:
    """Each by its own name; with what they are by default, nothing changes."""
    defaults = FormulaParameters()._asdict()
    options = [word for name, value in defaults.items() for word in (f"--{name}", str(value))]
    assert lines_of(moepack_command(*FORMULA, *options))[0].startswith("2.9715 tok/s ")
    for name, value in defaults.items():
        facts = body(moepack_command(*FORMULA, f"--{name}", str(2 * value), "--json"))
        assert facts["parameters"] == {**defaults, name: 2 * value}


USAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "no machine": (("MODEL",), "a model and --machine are needed"),
    "no model": (("--machine", "BOX"), "a model and --machine are needed"),
    "two ways": (("MODEL", "--machine", "BOX", "--all", "--n-cpu-moe", "1"), "either layers in"),
    "less than none": (("MODEL", "--machine", "BOX", "--n-cpu-moe", "-1"), "less than 0"),
    "no GPU": (("MODEL", "--machine", "NO_GPU", "--n-cpu-moe", "1"), "the machine has no GPU"),
    "no size": (("MODEL", "--machine", "BOX", "--budget", "8 pages"), "--budget: not a size"),
    "a short budget": (("MODEL", "--machine", "BOX", "--budget", "1KiB"), "at least 140.0 KiB"),
    "one number": (("MODEL", "--machine", "BOX", "--working-set", "20"), "found 20\n"),
    "three": (("MODEL", "--machine", "BOX", "--working-set", "20,4,1"), "found 20,4,1\n"),
    "D over U": (("MODEL", "--machine", "BOX", "--working-set", "4,20"), "not a working set"),
    "NaN": (("MODEL", "--machine", "BOX", "--working-set", "nan,0"), "two numbers of experts: U,D"),
    "infinite": (("MODEL", "--machine", "BOX", "--working-set", "inf,1"), "not a working set"),
    "negative": (("MODEL", "--machine", "BOX", "--working-set", "5,-1"), "not a working set"),
    "too deep": (("MODEL", "--machine", "BOX", "--depth", "5000"), "--depth: more tokens than"),
    "twice": (
        (
            *("MODEL", "--machine", "BOX", "--budget", "1MiB"),
            "--trace",
            "T",
            "--working-set",
            "2,1",
        ),
        "either a trace or a working set",
    ),
    "no receipt": (("MODEL", "--machine", "BOX", "--receipt", "BOX"), "line 1: not JSON"),
    "no plot": (("MODEL", "--machine", "BOX", "--all", "--plot", "plot.txt"), "plot.txt"),
    "options of the formula": (
        ("MODEL", "--machine", "BOX", "--ram_bytes", "1"),
        "--ram_bytes goes with --formula published",
    ),
    "a model for the formula": (("MODEL", "--formula", "published"), "knows no model"),
    "a machine for the formula": (("--machine", "BOX", "--formula", "published"), "no machine"),
    "nothing to divide by": (("--formula", "published", "--batch_size", "0"), "expected more than"),
    "another formula": (("--formula", "mine"), "published"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE)
def test_what_cannot_be_is_said(
    arguments: tuple[str, ...], message: str, box: Path, no_gpu: Path, moepack_command: Run
) -> None:
    named = {"MODEL": MODEL, "BOX": box, "NO_GPU": no_gpu, "T": TRACE}
    run = moepack_command("forecast", *(named.get(word, word) for word in arguments))
    assert (run.returncode, run.stdout) == (ExitCode.USAGE, "")
    assert message in run.stderr


def test_faults_have_the_exit_codes_of_other_commands(
    box: Path, tmp_path: Path, pack_copy: Path, moepack_command: Run
) -> None:
    dense = FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"
    mixtral = first_shard("mixtral")
    (pack_copy / manifest.NAME).write_text("{}")
    for arguments, code in (
        ((dense, "--machine", box), ExitCode.SOURCE_FAULT),
        ((pack_copy, "--machine", box), ExitCode.PACK_FAULT),
        ((MODEL, "--machine", tmp_path / "none.toml"), ExitCode.USAGE),
        ((MODEL, "--machine", TRACE), ExitCode.USAGE),
        ((mixtral, "--machine", box, "--budget", "1MiB", "--trace", TRACE), ExitCode.SOURCE_FAULT),
        ((MODEL, "--machine", box, "--receipt", tmp_path / "none.json"), ExitCode.USAGE),
    ):
        run = moepack_command("forecast", *arguments)
        assert (run.returncode, run.stdout) == (code, ""), run.stderr
        assert run.stderr.startswith("error: ")


@pytest.mark.parametrize("options", [("--all",), ("--budget", "512KiB"), ()])
def test_a_picture(
    options: tuple[str, ...], box: Path, no_gpu: Path, tmp_path: Path, moepack_command: Run
) -> None:
    for number, path in enumerate((box, no_gpu)):
        target = tmp_path / f"{number}.svg"
        arguments = ("forecast", MODEL, "--machine", path, *options, "--plot", target)
        run = moepack_command(*arguments)
        assert run.returncode == 0, run.stderr
        assert "<svg" in target.read_text()
    refused = moepack_command(*arguments)
    assert refused.returncode == ExitCode.USAGE
    assert "exists already" in refused.stderr
    assert moepack_command(*arguments, "--force").returncode == 0


def test_a_picture_of_speeds_that_are_not_known(tmp_path: Path, moepack_command: Run) -> None:
    path, target = tmp_path / "bare.toml", tmp_path / "speeds.png"
    path.write_text('[memory]\nlength = "64 GiB"\n')
    run = moepack_command("forecast", MODEL, "--machine", path, "--all", "--plot", target)
    assert run.returncode == 0, run.stderr
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_machine_may_come_from_standard_input(box: Path, moepack_command: Run) -> None:
    run = moepack_command("forecast", MODEL, "--machine", "-", input=box.read_text())
    assert lines_of(run)[0].startswith(f"{MODEL} on box: ")
