"""A model on several machines."""

from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.report import plan_text
from tests.support.machines import machine
from tests.support.values import some

SMALL, LARGE = machine(memory=4), machine(bandwidth=80, drive=7, vram=24, vram_bandwidth=936)


def test_each_machine_has_its_forecast_or_the_reason_why_not(gpt_oss: Path) -> None:
    facts = moepack.compare_machines(
        gpt_oss, [LARGE, SMALL._replace(name=None), "preset:mini-pc-32"], context=8192
    )
    large, small, mini = facts.machines
    assert (large.machine, small.machine, mini.machine) == ("box", "machine 2", "mini PC, 32 GB")
    assert large.forecast == moepack.forecast(gpt_oss, LARGE, context=8192)
    assert small.forecast is None
    assert some(small.refusal).startswith("too little memory for this model")
    text = str(plan_text.comparison(facts))
    rows = [line for line in text.splitlines() if line.startswith(("box", "machine", "mini"))]
    assert "in VRAM" in rows[0]
    assert "in memory" in rows[0]
    assert rows[1].split()[2:5] == ["does", "not", "run"]
    assert "on the drive" in rows[2]
    assert "note: machine 2: too little memory" in text
    assert "note: mini PC, 32 GB: without a trace, misses follow the curve of Qwen3" in text


def test_a_model_that_runs_on_none_is_refused(gpt_oss: Path) -> None:
    with pytest.raises(RequestError, match="too little memory"):
        moepack.compare_machines(gpt_oss, [SMALL, SMALL])
    with pytest.raises(RequestError, match="more tokens than the context holds"):
        moepack.compare_machines(gpt_oss, [LARGE, LARGE], depth=5000)
