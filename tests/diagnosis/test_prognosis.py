"""What a model needs here, what limits it, and what would help most."""

from pathlib import Path

import pytest

from moepack.diagnosis.prognosis import ANSWER_TOKENS, prognosis
from moepack.machine.model import Figure, Machine
from tests.support import large_models
from tests.support.machines import GB, machine

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return gpt-oss-120b, of which 57 GiB are experts, without its bytes."""
    return large_models.write("gpt-oss-120b", tmp_path_factory.mktemp("large") / "model.gguf")


def box(drive: float, compute: float = 1000, bandwidth: float = 80) -> Machine:
    known = machine(memory=64, bandwidth=bandwidth, basis="measured", drive=drive)
    return known._replace(compute=Figure(compute * GB, "measured"))


def test_a_slow_drive_is_the_limit_and_what_to_change(model: Path) -> None:
    found = prognosis(model, box(drive=1), 16 * GIB, 1000)
    assert (found.decode_limit, found.prompt_limit) == ("drive", "drive")
    assert found.changes[0].what.startswith("a drive twice as fast")
    assert found.forecast is not None
    (speed,) = found.forecast.forecasts
    assert speed.budget_length is not None
    assert speed.budget_length + GIB <= 17 * GIB
    takes = (speed.prompt.seconds or 0) + ANSWER_TOKENS / (speed.tokens_per_second or 1)
    assert found.seconds == pytest.approx(takes)
    assert [change.seconds for change in found.changes] == sorted(
        change.seconds for change in found.changes
    )
    assert all(change.seconds < takes for change in found.changes)


def test_with_a_fast_drive_something_else_is(model: Path) -> None:
    slow_processors = prognosis(model, box(drive=50, compute=50, bandwidth=8), 16 * GIB, 1000)
    assert (slow_processors.decode_limit, slow_processors.prompt_limit) == ("memory", "processor")
    assert slow_processors.changes[0].what == "processors and memory twice as fast"


def test_a_build_for_the_processor_helps_where_it_computes_long(model: Path) -> None:
    whats = {
        is_slow: [
            change.what
            for change in prognosis(
                model, box(drive=50, compute=50), 16 * GIB, 1000, is_slow_build=is_slow
            ).changes
        ]
        for is_slow in (False, True)
    }
    build = "a build of llama.cpp for this processor"
    assert build in whats[True]
    assert build not in whats[False]


def test_too_little_memory_is_said_with_what_lacks(model: Path) -> None:
    found = prognosis(model, box(drive=1), 2 * GIB, 1000)
    assert found.forecast is None
    assert "too little memory" in (found.refusal or "")
    assert "missing" in (found.refusal_hint or "")
