"""Presets: machines of unified memory, against runs that were published; several side by side."""

from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.planning.forecasting.facts import SpeedFacts
from moepack.planning.forecasting.modes import MARGIN
from moepack.report import plan_text
from tests.support import large_models
from tests.support.machines import machine
from tests.support.values import some

HALO, SPARK = "preset:strix-halo-128", "preset:dgx-spark"
PUBLISHED = [
    ("gpt-oss-120b", HALO, 47.4),  # lhl/strix-halo-testing#33
    ("gpt-oss-120b", SPARK, 43.9),  # AlexsJones/llmfit#917, by ollama
    ("Qwen3-30B-A3B", HALO, 66.0),  # fromthematrix.dev, Qwen3-Coder
]
"""Tokens a second in llama.cpp, whole in memory."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models by their names, without their bytes."""
    folder = tmp_path_factory.mktemp("large")
    names = dict.fromkeys([name for name, _, _ in PUBLISHED] + ["GLM-5"])
    return {name: large_models.write(name, folder / f"{name}.gguf") for name in names}


def only(model: Path, machine: str, **figures: str) -> SpeedFacts:
    box = moepack.describe_machine(machine, memory=figures.get("memory"))
    (speed,) = moepack.forecast(model, box).forecasts
    return speed


@pytest.mark.parametrize(("name", "machine", "speed"), PUBLISHED)
def test_published_speeds_come_out(
    models: dict[str, Path], name: str, machine: str, speed: float
) -> None:
    one = only(models[name], machine)
    assert one.kind == "gpu"
    assert some(one.tokens_per_second) == pytest.approx(speed, rel=0.25)
    assert some(one.lowest) < speed < some(one.highest)


def test_no_byte_counts_twice(models: dict[str, Path]) -> None:
    """At every size of memory: all that is taken, of both kinds together, is there."""
    model, kinds = models["gpt-oss-120b"], set()
    for length in (24, 48, 60, 62, 64, 128):
        one = only(model, HALO, memory=f"{length}GiB")
        kinds.add(one.kind)
        taken = some(one.vram_length) + some(one.memory_length)
        assert taken + MARGIN <= length << 30
        assert one.fits
        if one.kind == "gpu-stream":  # it has all that is left
            assert taken + MARGIN > (length << 30) - (1 << 20)
            assert one.vram_expert_length == 0
    assert kinds == {"gpu", "gpu-stream"}


@pytest.mark.parametrize("engine", ["llama.cpp", "pack"])
def test_a_placement_counts_no_byte_twice_either(models: dict[str, Path], engine: str) -> None:
    facts = moepack.place(models["gpt-oss-120b"], HALO, engine=engine)
    gpu, memory = facts.devices
    assert facts.option.vram_expert_length == gpu.expert_length > 50 << 30
    assert gpu.left_length == memory.left_length
    used = gpu.dense_length + gpu.context_length + gpu.expert_length + gpu.compute_length
    assert memory.left_length == memory.length - used - memory.dense_length
    assert any("the same memory" in note for note in facts.notes)


def test_what_does_not_fit_is_streamed_into_all_of_it(models: dict[str, Path]) -> None:
    facts = moepack.place(models["GLM-5"], HALO, engine="pack")
    gpu, memory = facts.devices
    assert (gpu.expert_length, gpu.left_length) == (0, memory.left_length)
    assert 0 <= memory.left_length - facts.margin_length < 1 << 20
    assert facts.option.memory_expert_length == memory.expert_length > 80 << 30
    assert some(facts.option.forecast).kind == "gpu-stream"
    assert not [one for one in facts.alternatives if one.vram_cache_length is not None]
    with pytest.raises(moepack.RequestError, match="too little memory"):
        moepack.place(models["GLM-5"], HALO)


# A model on several machines.

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
