"""Forecasts of `moepack run`: what it will read, to the byte."""

from pathlib import Path
from typing import Any

import pytest

from moepack.forecasting.forecast import forecast
from moepack.placing.place import place
from tests.support.machines import machine
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_misses_are_those_of_a_run_with_the_same_trace(
    share: float, packs: dict[str, Path], tmp_path: Path
) -> None:
    from moepack.running.model import Model

    pack, trace = packs["qwen3moe"], tmp_path / "run.moetrace"
    outside = place(pack, memory=1 << 30, margin=0, context=64).devices[0]
    memory = outside.length - outside.left_length - round((1 - share) * outside.expert_length)
    # One thread: several of them wait for each other in a loop, on processors that others use.
    options: dict[str, Any] = {"context": 64, "prefetch": "off", "threads": 1}
    with Model(pack, memory=memory, trace=trace, **options) as model:
        generation = model.generate("the sea", count=24)
        for _ in generation:
            pass
        facts = generation.facts
    box = machine(bandwidth=20, drive=2)
    (found,) = forecast(
        pack,
        box,
        budget=facts.memory.experts,
        traces=[str(trace)],
        batch_count=facts.batch_count,
    ).forecasts
    assert facts.misses > 0 or share == 1
    assert found.missed_length == round(facts.read_length / facts.step_count)
    assert found.hit_rate == facts.hit_rate
