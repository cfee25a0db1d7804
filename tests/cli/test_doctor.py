"""`moepack doctor`: a page for people, an object for programs."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.needs import require_disk

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_page_has_every_check_and_the_model(moepack_command: Run, packs: dict[str, Path]) -> None:
    pack = packs["qwen3moe"]
    require_disk(pack)
    done = moepack_command("doctor", str(pack), "--seconds", "0", "--prompt", "300")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("memory ")
    assert any(line.startswith("drive ") and "in random reads of" in line for line in lines)
    assert any(line.startswith(f"{pack}: 1.0 MiB of experts") for line in lines)
    assert any(line.startswith("  prompt: 300 tokens: ") for line in lines)


def test_json_has_findings_and_a_prognosis(moepack_command: Run, packs: dict[str, Path]) -> None:
    done = moepack_command("doctor", str(packs["qwen3moe"]), "--seconds", "0", "--json")
    facts = json.loads(done.stdout)
    assert {one["verdict"] for one in facts["findings"]} <= {"fine", "limit", "problem", "unknown"}
    assert facts["prognosis"]["forecast"]["forecasts"][0]["prompt"]["token_count"] == 1000
    assert facts["machine"]["memory"]["basis"] == "read"


@pytest.mark.parametrize("arguments", [("none.gguf",), ("--directory", "none")])
def test_what_is_not_there_is_named(moepack_command: Run, arguments: tuple[str, ...]) -> None:
    done = moepack_command("doctor", *arguments, "--seconds", "0")
    assert done.returncode != 0
    assert "none" in done.stderr
