"""Execution modes of a model: where its parts lie, the reads of a token, which fit."""

from pathlib import Path

import pytest

from moepack.common.errors import RequestError, SourceError
from moepack.planning.forecasting.modes import MARGIN, ExecutionMode, ModelProfile
from tests.support.gguf_builder import moe
from tests.support.machines import GB, machine
from tests.support.models import FIXTURES, first_shard
from tests.support.values import some

CONTEXT = 256
CPU, STREAM = ExecutionMode("cpu"), ExecutionMode("stream")


@pytest.fixture(scope="module")
def model() -> ModelProfile:
    """Return one without experts in its first layer."""
    return ModelProfile(first_shard("deepseek2"), CONTEXT)


def test_the_first_blocks_may_have_no_experts(model: ModelProfile) -> None:
    layers = [layer.layer for layer in model.layers]
    assert layers[0] > 0, "a leading dense block"
    assert model.offload(layers[0]).kind == "gpu", "which wastes one of N"
    assert model.offload(layers[0] + 1).kind == "offload"
    assert [mode.cpu_layer_count for mode in model.offloads()] == [0, *(n + 1 for n in layers)]


def test_all_bytes_of_a_token_are_read_somewhere(model: ModelProfile) -> None:
    weights, count = model.weights, len(model.layers)
    whole = some(model.reads(ExecutionMode("gpu", 0), 0, 0)).vram
    assert whole == (weights.read_dense_length or 0) + (weights.read_expert_length or 0)
    reads = [some(model.reads(mode, 0, 0)) for mode in model.offloads()]
    assert {(one.vram + one.memory, one.layer_count) for one in reads} == {(whole, count)}
    assert reads[-1].memory == weights.read_expert_length
    assert model.reads(ExecutionMode("stream", budget=1), 5, 0) == (count, 0, whole, 5, 0)
    assert model.reads(CPU, 0, 0) == (count, 0, whole, 0, 0)
    deep = some(model.reads(CPU, 0, CONTEXT)).memory
    assert 0 < deep - whole <= (model.context_length("cpu") or 0), "a context is read as well"


def test_all_parts_lie_somewhere(model: ModelProfile) -> None:
    whole, outer = some(model.needs(CPU).memory), some(model.weights.outer)
    twice = outer.output_length if outer.is_tied else 0
    for mode in model.offloads():
        vram, memory = map(some, model.needs(mode))
        # A GPU that computes with experts from memory has room for a copy of a tensor of them.
        staged = model.weights.staged_length if mode.kind == "offload" else 0
        assert vram + memory == whole + twice + staged
    assert model.needs(model.offloads()[0]).memory == outer.embedding_length
    experts = model.weights.expert_length
    assert model.needs(ExecutionMode("stream", budget=experts)) == (0, whole)
    assert model.needs(ExecutionMode("stream", budget=0)) == (0, whole - experts)


def test_a_fitting_mode_leaves_a_margin(model: ModelProfile) -> None:
    needs, offload = model.needs(CPU), model.needs(model.offloads()[1])
    exact, vram = (some(needs.memory) + MARGIN) / GB, (some(offload.vram) + MARGIN) / GB
    assert needs.fit(machine(memory=exact)) is True
    assert needs.fit(machine(memory=exact - 1e-6)) is False
    assert offload.fit(machine(vram=vram)) is True
    assert offload.fit(machine(vram=vram - 1e-6)) is False
    assert offload.fit(machine()) is False
    half = (some(offload.vram) / 2 + MARGIN) / GB
    assert offload.fit(machine(vram=half, gpu_count=2)) is True


def test_the_best_mode_has_as_little_in_memory_as_fits(model: ModelProfile) -> None:
    assert model.best(machine(vram=24), STREAM) == ExecutionMode("gpu", 0)
    third = model.offloads()[2]
    vram = some(model.needs(third).vram)
    assert model.best(machine(vram=(vram + MARGIN) / GB), STREAM) == third
    assert model.best(machine(vram=MARGIN / GB), STREAM) == CPU
    assert model.best(machine(), STREAM) == CPU


def test_experts_that_do_not_fit_are_streamed_down_to_the_floor(model: ModelProfile) -> None:
    whole, short = some(model.needs(CPU).memory), 100_000
    mode = model.best(machine(memory=(whole - short + MARGIN) / GB), STREAM)
    assert mode == ExecutionMode("stream", budget=model.weights.expert_length - short)
    step = some(model.step_length)
    enough = some(model.needs(ExecutionMode("stream", budget=0)).memory) + step + MARGIN
    least = ExecutionMode("stream", budget=step)
    assert model.best(machine(memory=enough / GB), STREAM) == least
    with pytest.raises(RequestError, match="too little memory") as caught:
        model.best(machine(memory=(enough - 2048) / GB), STREAM)
    assert caught.value.hint == "2.0 KiB are missing"


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(SourceError, match="a dense model"):
        ModelProfile(FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf", CONTEXT)


def test_a_layer_that_is_not_run_makes_no_read_shorter(tmp_path: Path) -> None:
    builder = moe((0, 1, 2), architecture="deepseek2")
    path = builder.put("deepseek2.nextn_predict_layers", "u32", 1).write(tmp_path / "model.gguf")
    model = ModelProfile(path, CONTEXT)
    assert len(model.layers) == 2
    assert model.read_length == 64 * 34, "a slice of 32 rows of two blocks of Q8_0"


def test_dense_weights_are_in_vram_if_they_fit(model: ModelProfile) -> None:
    vram = some(model.needs(ExecutionMode("gpu-stream", budget=0)).vram)
    enough = (vram + MARGIN) / GB
    for box, kind in (
        (machine(memory=0.1, vram=enough), "gpu-stream"),
        (machine(memory=0.1, vram=enough - 1e-6), "stream"),
        (machine(memory=0.1), "stream"),
    ):
        assert model.stream(box).kind == kind
    experts, streams = model.weights.expert_length, ExecutionMode("gpu-stream", budget=1000)
    assert model.needs(streams) == (vram, some(model.weights.outer).embedding_length + 1000)
    all_there = ExecutionMode("gpu-stream", budget=2 * experts)
    assert model.needs(all_there) == model.needs(model.offloads()[-1])
    reads = some(model.reads(streams, 5, 0))
    assert (reads.memory, reads.drive) == (model.step_length, 5)
    assert reads.vram + reads.memory == some(model.reads(CPU, 0, 0)).memory
