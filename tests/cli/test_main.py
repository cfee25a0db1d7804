"""The command line: what it prints, its JSON, its exit codes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_builder import moe
from tests.support.models import FIXTURES, first_shard, flip

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


def keys(value: Any) -> set[str]:
    """Collect all keys of a JSON value, but not those inside what a pack took from elsewhere."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    inner = (keys(v) for k, v in value.items() if k not in ("layout", "source", "hotness"))
    return set(value).union(*inner)


@pytest.fixture
def packed(tmp_path: Path, moepack_command: Run) -> Path:
    """Pack qwen3moe by the command."""
    heat = FIXTURES / "qwen3moe-hotness.csv"
    target = tmp_path / "pack"
    run = moepack_command("pack", first_shard("qwen3moe"), "-o", target, "--hotness", heat)
    assert (run.returncode, run.stderr) == (0, "")
    return target


def test_each_command_prints_one_json_object_with_documented_fields(
    packed: Path, tmp_path: Path, moepack_command: Run
) -> None:
    at = ("--layer", "0", "--expert", "2")
    for arguments in (
        ("inspect", first_shard("deepseek2")),
        ("inspect", packed),
        ("pack", first_shard("mixtral"), "-o", tmp_path / "other"),
        ("pack", first_shard("mixtral"), "-o", tmp_path / "none", "--dry-run"),
        ("verify", packed, "--source", first_shard("qwen3moe")),
        ("locate", packed, *at),
        ("extract", packed, *at, "-o", tmp_path / "blob.bin"),
        ("list", packed),
        ("trace", "import", FIXTURES / "qwen3moe-trace.csv", "-o", tmp_path / "trace"),
        ("trace", "stats", tmp_path / "trace", "--pack", packed),
        ("trace", "concentration", tmp_path / "trace"),
        ("hotness", tmp_path / "trace", "-o", tmp_path / "hot.csv"),
    ):
        run = moepack_command(*arguments, "--json")
        assert run.returncode == 0, run.stderr
        body = json.loads(run.stdout)
        undocumented = {key for key in keys(body) if f"`{key}`" not in COMMANDS}
        undocumented -= {"first_blob", "hotness_measured", "interleaved_row_count", "type_name"}
        assert not undocumented, arguments


def test_inspect_describes_a_source(moepack_command: Run) -> None:
    body = json.loads(moepack_command("inspect", first_shard("deepseek2"), "--json").stdout)
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


def test_inspect_describes_a_pack(packed: Path, moepack_command: Run) -> None:
    body = json.loads(moepack_command("inspect", packed, "--json").stdout)
    assert body["order"] == "hotness"
    assert body["hotness"]["token_count"] == 192
    assert body["layout"]["name"] == "layers"
    assert body["padding_length"] == body["data_length"] - body["payload_length"]
    text = moepack_command("inspect", packed).stdout
    assert "192 tokens" in text
    assert "padding 19.2%; whole" in text
    assert "\n  blobs      32, with 96 parts, " in text


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, moepack_command: Run) -> None:
    target = tmp_path / "pack"
    run = moepack_command("pack", first_shard("qwen3moe"), "-o", target, "--dry-run")
    assert run.returncode == 0
    assert "3 files" in run.stdout
    assert "\n  free      " in run.stdout
    assert not target.exists()


def test_extract_gives_exactly_the_parts_bytes(
    packed: Path, tmp_path: Path, moepack_command: Run
) -> None:
    at = ("--layer", "1", "--expert", "5")
    where = json.loads(moepack_command("locate", packed, *at, "--json").stdout)
    data = Path(where["path"]).read_bytes()
    for part in where["parts"]:
        target = tmp_path / "part.bin"
        moepack_command("extract", packed, *at, "--part", part["name"], "-o", target, "--force")
        assert target.read_bytes() == data[part["offset"] : part["offset"] + part["length"]]
    run = moepack_command("extract", packed, *at, "-o", "-", text=False)
    assert run.stdout == data[where["offset"] : where["offset"] + where["length"]]  # type: ignore[comparison-overlap]


def test_layers_can_be_chosen(tmp_path: Path, moepack_command: Run) -> None:
    path = moe((0, 1, 2, 5)).write(tmp_path / "m.gguf")
    run = moepack_command("pack", path, "-o", tmp_path / "p", "--layers", "0-1,5", "--json")
    assert json.loads(run.stdout)["layers"] == [0, 1, 5]
    assert moepack_command("verify", tmp_path / "p", "--source", path).returncode == 0


def test_prediction_layers_are_packed_unless_left_out(tmp_path: Path, moepack_command: Run) -> None:
    builder = moe((0, 1, 2)).put("qwen3moe.nextn_predict_layers", "u32", 1)
    path = builder.write(tmp_path / "m.gguf")
    assert json.loads(moepack_command("inspect", path, "--json").stdout)["mtp_layers"] == [2]
    for option, layers in (((), [0, 1, 2]), (("--no-mtp",), [0, 1])):
        target = tmp_path / f"pack{len(layers)}"
        run = moepack_command("pack", path, "-o", target, "--json", *option)
        assert json.loads(run.stdout)["layers"] == layers
        assert moepack_command("verify", target, "--source", path).returncode == 0


def test_junit_is_written_when_it_passes_and_when_it_fails(
    packed: Path, tmp_path: Path, moepack_command: Run
) -> None:
    report = tmp_path / "report.xml"
    assert moepack_command("verify", packed, "--junit", report).returncode == 0
    assert 'failures="0"' in report.read_text()
    flip(packed / "experts-00000.bin", 5)
    assert moepack_command("verify", packed, "--junit", report, "--force").returncode == 5
    assert "ffn_gate_exps.weight" in report.read_text()


def damaged_file(packed: Path) -> None:
    flip(packed / "experts-00000.bin", 5)


def damaged_index(packed: Path) -> None:
    flip(packed / "index.bin", 2000)


def no_manifest(packed: Path) -> None:
    (packed / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("change", "arguments", "code", "word"),
    [
        (None, ("verify", "{pack}"), 0, "sound"),
        (None, ("locate", "{pack}"), 2, "--layer"),
        (None, ("locate", "{pack}", "--layer", "9", "--expert", "0"), 2, "no experts in layer 9"),
        (None, ("pack", "{model}", "-o", "{pack}"), 2, "a whole pack is here already"),
        (None, ("pack", "{model}", "-o", "x", "--layout", "nope"), 2, "no such layout"),
        (None, ("pack", "{model}", "-o", "x", "--layers", "7"), 2, "layer 7 has no experts"),
        (None, ("pack", "{model}", "-o", "x", "--layers", "1-"), 2, "not a list"),
        (None, ("frobnicate",), 2, "frobnicate"),
        (None, ("inspect", "{dense}"), 3, "a dense model"),
        (None, ("inspect", "nothing.gguf"), 3, "no such file"),
        (None, ("pack", "{model}", "-o", "x", "--hotness", "{model}"), 3, "without counts"),
        (None, ("verify", "{pack}", "--source", "{dense}"), 5, "source"),
        (None, ("inspect", "{tmp}/none.moepack"), 3, "no such file"),
        (no_manifest, ("verify", "{pack}"), 4, "no manifest"),
        (no_manifest, ("inspect", "{pack}"), 4, "no manifest"),
        (damaged_index, ("locate", "{pack}", "--layer", "0", "--expert", "0"), 4, "damaged"),
        (damaged_index, ("verify", "{pack}"), 5, "index"),
        (damaged_file, ("verify", "{pack}"), 5, "digest"),
        (damaged_file, ("extract", "{pack}", "--layer=0", "--expert=2", "-o", "x"), 4, "digest"),
        (None, ("pack", "{model}", "-o", "{tmp}/no/such/dir"), 2, "no such folder"),
    ],
)  # fmt: skip
def test_exit_codes_and_messages(
    change: Callable[[Path], None] | None,
    arguments: tuple[str, ...],
    code: int,
    word: str,
    packed: Path,
    tmp_path: Path,
    moepack_command: Run,
) -> None:
    if change:
        change(packed)
    names = {"pack": packed, "model": first_shard("qwen3moe"), "tmp": tmp_path,
             "dense": FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf"}  # fmt: skip
    run = moepack_command(*(text.format(**names) for text in arguments), cwd=tmp_path)
    assert run.returncode == code, run.stderr
    assert word in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    if code not in (0, 5):
        assert run.stderr.startswith("error: ")
        assert not (tmp_path / "x").exists()


def test_a_full_standard_output_is_no_traceback(packed: Path, moepack_command: Run) -> None:
    with open("/dev/full", "w") as full:
        run = moepack_command(
            *("inspect", packed), capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert run.returncode == 6
    assert "Traceback" not in run.stderr


def test_a_pack_that_is_too_small_for_a_picture_is_measured_all_the_same(
    tmp_path: Path, moepack_command: Run
) -> None:
    assert moepack_command("pack", moe().write(tmp_path / "m.gguf"), "-o", tmp_path / "p")
    little = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0.001")
    run = moepack_command("bench", tmp_path / "p", *little, "--plot", tmp_path / "s.svg")
    assert (run.returncode, "nothing is drawn" in run.stderr) == (0, True), run.stderr
    assert not (tmp_path / "s.svg").exists()


@pytest.mark.parametrize("has_source", [False, True])
def test_bench_says_early_that_nothing_is_compared(
    has_source: bool, packs: dict[str, Path], moepack_command: Run
) -> None:
    source = ("--source", first_shard("qwen3moe")) if has_source else ()
    little = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0")
    run = moepack_command("bench", packs["qwen3moe"], *source, *little)
    assert run.returncode == 0, run.stderr
    assert ("nothing to compare the pack with" in run.stderr) != has_source
