"""Execution modes of a model: where its parts lie, the reads of a token, which fit."""

import pytest

from moepack.common.errors import RequestError
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.modes import MARGIN, ExecutionMode, ModelOnMachine
from moepack.planning.machine.model import Machine
from tests.support.machines import GB, machine
from tests.support.models import first_shard
from tests.support.values import some

CONTEXT = 256
CPU, STREAM = ExecutionMode("cpu"), ExecutionMode("stream")


def on(box: Machine) -> ModelOnMachine:
    """Return a model without experts in its first layer, on a machine."""
    return ModelOnMachine(footprint_of(first_shard("deepseek2")), box, CONTEXT)


@pytest.fixture(scope="module")
def model() -> ModelOnMachine:
    return on(machine())


def test_all_bytes_of_a_token_are_read_somewhere(model: ModelOnMachine) -> None:
    weights, count = model.weights, len(model.layers)
    whole = some(model.reads(ExecutionMode("gpu", 0), 0, 0)).vram
    assert whole == (weights.read_dense_length or 0) + (weights.read_expert_length or 0)
    reads = [some(model.reads(mode, 0, 0)) for mode in model.offloads()]
    assert {(one.vram + one.memory, one.layer_count) for one in reads} == {(whole, count)}
    assert reads[-1].memory == weights.read_expert_length
    assert some(model.reads(ExecutionMode("stream", budget=1), 5, 0))[2:] == (0, whole, 5, 0)
    assert model.reads(CPU, 0, 0) == (count, 0, 0, whole, 0, 0)
    deep = some(model.reads(CPU, 0, CONTEXT)).memory
    assert 0 < deep - whole <= some(model.context_lengths["cpu"]), "a context is read as well"


def test_all_parts_lie_somewhere(model: ModelOnMachine) -> None:
    (_, whole), outer = some(model.needs(CPU)), some(model.weights.outer)
    twice = outer.output_length if outer.is_tied else 0
    for mode in model.offloads():
        vram, memory = some(model.needs(mode))
        # A GPU that computes with experts from memory has room for a copy of a tensor of them.
        staged = model.weights.staged_length if mode.kind == "offload" else 0
        assert vram + memory == whole + twice + staged
    assert some(model.needs(model.offloads()[0]))[1] == outer.embedding_length
    experts = model.weights.expert_length
    assert model.needs(ExecutionMode("stream", budget=experts)) == (0, whole)
    assert model.needs(ExecutionMode("stream", budget=0)) == (0, whole - experts)


def test_the_best_mode_has_as_little_in_memory_as_fits(model: ModelOnMachine) -> None:
    third = model.offloads()[2]
    vram = some(model.needs(third))[0]
    for box, best in (
        (machine(vram=24), ExecutionMode("gpu", 0)),
        (machine(vram=(vram + MARGIN) / GB), third),
        (machine(vram=MARGIN / GB), CPU),
        (machine(), CPU),
    ):
        assert on(box).best(STREAM) == best


def test_experts_that_do_not_fit_are_streamed_down_to_the_floor(model: ModelOnMachine) -> None:
    (_, whole), short = some(model.needs(CPU)), 100_000
    mode = on(machine(memory=(whole - short + MARGIN) / GB)).best(STREAM)
    assert mode == ExecutionMode("stream", budget=model.weights.expert_length - short)
    step = some(model.step_length)
    enough = some(model.needs(ExecutionMode("stream", budget=0)))[1] + step + MARGIN
    assert on(machine(memory=enough / GB)).best(STREAM) == ExecutionMode("stream", budget=step)
    with pytest.raises(RequestError, match="too little memory") as caught:
        on(machine(memory=(enough - 2048) / GB)).best(STREAM)
    assert caught.value.hint == "2.0 KiB are missing"
