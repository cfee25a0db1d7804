"""The command `report`: what it writes, prints and refuses."""

import json
import os
from pathlib import Path

import pytest

from tests.support.children import wait_until
from tests.support.models import first_shard
from tests.support.warm_command import Run

MODEL = first_shard("mixtral")


def test_a_page_is_written_and_summed_up(cli: Run, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    run = cli("report", MODEL, "-o", output)
    assert (run.returncode, run.stderr) == (0, "")
    first, second = run.stdout.splitlines()
    assert first.startswith(f"{output}: ")
    assert ", 1 section, " in first
    assert "what the hottest experts cover" in second
    assert output.read_text().startswith("<!doctype html>")
    assert output.read_text().endswith("</html>\n")


def test_the_summary_is_json_too(cli: Run, packs: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    run = cli("report", packs["mixtral"], "-o", output, "--json")
    facts = json.loads(run.stdout)
    assert facts["path"] == str(output)
    assert facts["length"] == output.stat().st_size
    assert facts["sections"] == ["The model", "The map of the pack"]
    assert all(one["reason"] for one in facts["missing"])


def test_open_starts_a_browser(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener, note = tmp_path / "xdg-open", tmp_path / "opened"
    opener.write_text(f'#!/bin/sh\necho "$1" > {note}.part\nmv {note}.part {note}\n')
    opener.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    output = tmp_path / "report.html"
    run = cli("report", MODEL, "-o", output, "--open")
    assert run.returncode == 0, run.stderr
    wait_until(note.exists)
    assert note.read_text().strip() == str(output)
