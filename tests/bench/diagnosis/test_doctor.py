"""All checks at once, on this machine."""

import os
from functools import partial
from pathlib import Path

import pytest

import moepack
from moepack.bench.diagnosis import doctor
from moepack.bench.machine import measure_machine
from moepack.report import plan_text
from tests.support.needs import needs_library

pytestmark = needs_library

NAMES = [
    *("memory", "memory pressure", "processors", "memory bandwidth", "llama.cpp", "variables"),
    *("GPU", "drive", "file system"),
]


def test_every_check_has_a_line_and_what_to_do(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy processors are those that work now, not the load of the last minute."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    facts = moepack.doctor(packs["qwen3moe"], seconds=0)
    names = [finding.name for finding in facts.findings]
    assert names[: len(NAMES)] == NAMES
    assert len(names) == len(set(names))
    assert all(one.hint for one in facts.findings if one.verdict in ("limit", "problem"))
    text = plan_text.doctor(facts)
    for finding in facts.findings:
        assert f"\n{finding.name} " in f"\n{text}"
    assert "a hint" not in text
    assert "1000000.0 are busy" not in text


def test_without_a_model_a_folder_is_tried_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = partial(measure_machine, scratch_length=40 << 20)
    monkeypatch.setattr(doctor, "measure_machine", measure)
    report = moepack.doctor(directory=tmp_path, seconds=0)
    assert (report.model, report.prognosis) == (None, None)
    assert not list(tmp_path.iterdir())
    assert "moepack doctor MODEL" in plan_text.doctor(report)
