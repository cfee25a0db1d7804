"""`moepack doctor`: a page for people, an object for programs."""

import json
from pathlib import Path

from tests.support.needs import require_disk
from tests.support.warm_command import Run


def test_a_page_has_every_check_and_the_model(cli: Run, packs: dict[str, Path]) -> None:
    pack = packs["qwen3moe"]
    require_disk(pack)
    done = cli("doctor", str(pack), "--seconds", "0", "--prompt", "300")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("memory ")
    assert any(line.startswith("drive ") and "in random reads of" in line for line in lines)
    assert any(line.startswith(f"{pack}: 1.0 MiB of experts") for line in lines)
    assert any(line.startswith("  prompt: 300 tokens: ") for line in lines)


def test_json_has_findings_and_a_prognosis(cli: Run, packs: dict[str, Path]) -> None:
    done = cli("doctor", str(packs["qwen3moe"]), "--seconds", "0", "--json")
    facts = json.loads(done.stdout)
    assert {one["verdict"] for one in facts["findings"]} <= {"fine", "limit", "problem", "unknown"}
    assert facts["prognosis"]["forecast"]["forecasts"][0]["prompt"]["token_count"] == 1000
    assert facts["machine"]["memory"]["basis"] == "read"
