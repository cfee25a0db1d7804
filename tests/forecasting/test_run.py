"""Forecasts of `moepack run`: what it will read, to the byte."""

from pathlib import Path

import pytest

from moepack.forecasting.forecast import forecast
from moepack.packing.pack_model import pack_model
from tests.support.machines import machine
from tests.support.models import first_shard
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_misses_are_those_of_a_run_with_the_same_trace(tmp_path: Path, share: float) -> None:
    from moepack.running.model import Model

    pack, trace = tmp_path / "model.moepack", tmp_path / "run.moetrace"
    pack_model(first_shard("qwen3moe"), pack)
    with Model(pack, memory="floor", context=128) as model:
        floor = model.memory
    experts = 1 << 20
    memory = floor.dense + floor.context + max(floor.experts, int(share * experts))
    with Model(pack, memory=memory, context=128, trace=trace, prefetch="off") as model:
        generation = model.generate("the sea", count=40)
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
    assert found.missed_length == round(facts.read_length / facts.step_count)
    assert found.hit_rate == facts.hit_rate
