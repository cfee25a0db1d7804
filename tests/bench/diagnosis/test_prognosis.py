"""What a model needs here, what limits it, and what would help most."""

from pathlib import Path

import pytest

from moepack.bench.diagnosis.doctor import ANSWER_TOKENS, prognosis
from moepack.planning.forecasting.modes import MARGIN
from moepack.planning.machine.model import Figure, Machine
from tests.support.machines import GB, machine

GIB = 1 << 30


def box(
    drive: float, compute: float = 1000, bandwidth: float = 80, free: int = 16 * GIB
) -> Machine:
    measured = machine(bandwidth=bandwidth, basis="measured", drive=drive)
    memory = Figure(free + MARGIN, "read")
    return measured._replace(memory=memory, compute=Figure(compute * GB, "measured"))


def test_a_slow_drive_is_the_limit_and_what_to_change(gpt_oss: Path) -> None:
    outlook = prognosis(gpt_oss, box(drive=1), 1000)
    assert (outlook.decode_limit, outlook.prompt_limit) == ("drive", "drive")
    assert any(one.what.startswith("a drive twice as fast") for one in outlook.changes[:2])
    assert outlook.forecast is not None
    (speed,) = outlook.forecast.forecasts
    assert speed.budget_length is not None
    assert speed.budget_length + GIB <= 17 * GIB
    takes = (speed.prompt.seconds or 0) + ANSWER_TOKENS / (speed.tokens_per_second or 1)
    assert outlook.seconds == pytest.approx(takes)
    assert [change.seconds for change in outlook.changes] == sorted(
        change.seconds for change in outlook.changes
    )
    assert all(change.seconds < takes for change in outlook.changes)


def test_with_a_fast_drive_something_else_is(gpt_oss: Path) -> None:
    slow_processors = prognosis(gpt_oss, box(drive=50, compute=50, bandwidth=8), 1000)
    assert (slow_processors.decode_limit, slow_processors.prompt_limit) == ("memory", "processor")
    assert slow_processors.changes[0].what == "processors and memory twice as fast"


def test_a_build_for_the_processor_helps_where_it_computes_long(gpt_oss: Path) -> None:
    machine = box(drive=50, compute=50)
    for is_slow in (False, True):
        outlook = prognosis(gpt_oss, machine, 1000, is_slow_build=is_slow)
        changes = [change.what for change in outlook.changes]
        assert ("a build of llama.cpp for this processor" in changes) == is_slow


def test_too_little_memory_is_said_with_what_lacks(gpt_oss: Path) -> None:
    outlook = prognosis(gpt_oss, box(drive=1, free=2 * GIB), 1000)
    assert outlook.forecast is None
    assert "too little memory" in (outlook.refusal or "")
    assert "missing" in (outlook.refusal_hint or "")
