"""Ways of running a model: what is where, what is read, what fits."""

from pathlib import Path

import pytest

from moepack.errors import RequestError, SourceError
from moepack.forecasting.ways import MARGIN, Model, Way
from tests.support.gguf_builder import moe
from tests.support.machines import GB, machine
from tests.support.models import FIXTURES, first_shard

CONTEXT = 256
STREAM = Way("stream")


@pytest.fixture(scope="module")
def model() -> Model:
    """Return one whose first layer has no experts."""
    return Model(first_shard("deepseek2"), CONTEXT)


def test_the_first_blocks_may_have_no_experts(model: Model) -> None:
    layers = [layer.layer for layer in model.layers]
    assert layers[0] > 0, "a leading dense block"
    assert model.offload(layers[0]).kind == "gpu", "which wastes one of N"
    assert model.offload(layers[0] + 1).kind == "offload"
    assert [way.cpu_layer_count for way in model.offloads()] == [0, *(n + 1 for n in layers)]


def test_what_a_token_reads_is_somewhere(model: Model) -> None:
    whole = model.reads(Way("gpu", 0), 0, 0)
    assert whole is not None
    weights = model.weights
    assert whole.vram == (weights.read_dense_length or 0) + (weights.read_expert_length or 0)
    for way in model.offloads():
        reads = model.reads(way, 0, 0)
        assert reads is not None
        assert reads.vram + reads.memory == whole.vram
        assert reads.layer_count == len(model.layers)
    last = model.reads(model.offloads()[-1], 0, 0)
    assert last is not None
    assert last.memory == weights.read_expert_length
    assert model.reads(Way("stream", budget=1), 5, 0) == (len(model.layers), 0, whole.vram, 5, 0)
    assert model.reads(Way("cpu"), 0, 0) == (len(model.layers), 0, whole.vram, 0, 0)


def test_a_context_is_read_as_well(model: Model) -> None:
    empty, deep = (model.reads(Way("cpu"), 0, depth) for depth in (0, CONTEXT))
    assert empty is not None
    assert deep is not None
    assert 0 < deep.memory - empty.memory <= (model.context_length("cpu") or 0)


def test_what_it_takes_is_somewhere(model: Model) -> None:
    whole = model.needs(Way("cpu")).memory
    outer = model.weights.outer
    assert whole is not None
    assert outer is not None
    twice = outer.output_length if outer.is_tied else 0
    for way in model.offloads():
        vram, memory = model.needs(way)
        assert vram is not None
        assert memory is not None
        # A GPU that computes with experts from memory has room for a copy of a tensor of them.
        staged = model.weights.staged_length if way.kind == "offload" else 0
        assert vram + memory == whole + twice + staged
    assert model.needs(model.offloads()[0]).memory == outer.embedding_length
    experts = model.weights.expert_length
    assert model.needs(Way("stream", budget=experts)) == (0, whole)
    assert model.needs(Way("stream", budget=0)) == (0, whole - experts)


def test_what_fits_leaves_a_margin(model: Model) -> None:
    needs = model.needs(Way("cpu"))
    assert needs.memory is not None
    exact = (needs.memory + MARGIN) / GB
    assert needs.fit(machine(memory=exact)) is True
    assert needs.fit(machine(memory=exact - 1e-6)) is False
    offload = model.needs(model.offloads()[1])
    assert offload.vram is not None
    assert offload.fit(machine(vram=(offload.vram + MARGIN) / GB)) is True
    assert offload.fit(machine(vram=(offload.vram + MARGIN) / GB - 1e-6)) is False
    assert offload.fit(machine()) is False
    half = (offload.vram / 2 + MARGIN) / GB
    assert offload.fit(machine(vram=half, gpu_count=2)) is True


def test_the_best_way_has_as_little_in_memory_as_fits(model: Model) -> None:
    assert model.best(machine(vram=24), STREAM) == Way("gpu", 0)
    third = model.offloads()[2]
    vram = model.needs(third).vram
    assert vram is not None
    assert model.best(machine(vram=(vram + MARGIN) / GB), STREAM) == third
    assert model.best(machine(vram=MARGIN / GB), STREAM) == Way("cpu")
    assert model.best(machine(), STREAM) == Way("cpu")


def test_what_has_no_room_is_streamed(model: Model) -> None:
    whole = model.needs(Way("cpu")).memory
    assert whole is not None
    short = 100_000
    way = model.best(machine(memory=(whole - short + MARGIN) / GB), STREAM)
    assert way == Way("stream", budget=model.weights.expert_length - short)


def test_below_the_floor_it_says_what_is_missing(model: Model) -> None:
    fixed = model.needs(Way("stream", budget=0)).memory
    step = model.step_length
    assert fixed is not None
    assert step is not None
    enough = fixed + step + MARGIN
    assert model.best(machine(memory=enough / GB), STREAM) == Way("stream", budget=step)
    with pytest.raises(RequestError, match="too little memory") as caught:
        model.best(machine(memory=(enough - 2048) / GB), STREAM)
    assert caught.value.hint == "2.0 KiB are missing"


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(SourceError, match="a dense model"):
        Model(FIXTURES / "llama-dense-Q4_K_M-t12-00001-of-00002.gguf", CONTEXT)


def test_a_layer_that_is_not_run_makes_no_read_shorter(tmp_path: Path) -> None:
    builder = moe((0, 1, 2), architecture="deepseek2")
    path = builder.put("deepseek2.nextn_predict_layers", "u32", 1).write(tmp_path / "model.gguf")
    model = Model(path, CONTEXT)
    assert len(model.layers) == 2
    assert model.read_length == 64 * 34, "a slice of 32 rows of two blocks of Q8_0"


def test_a_pack_is_read_blob_by_blob(model: Model, tmp_path: Path) -> None:
    from moepack.packing.pack_model import pack_model

    pack_model(first_shard("deepseek2"), tmp_path / "model.moepack")
    packed = Model(tmp_path / "model.moepack", CONTEXT)
    assert packed.read_length // 3 == model.read_length
    assert packed.weights == model.weights


def test_what_is_no_expert_is_in_vram_where_that_has_room(model: Model) -> None:
    vram = model.needs(Way("gpu-stream", budget=0)).vram
    assert vram is not None
    enough = (vram + MARGIN) / GB
    small = 0.1
    assert model.stream(machine(memory=small, vram=enough)).kind == "gpu-stream"
    assert model.stream(machine(memory=small, vram=enough - 1e-6)).kind == "stream"
    assert model.stream(machine(memory=small)).kind == "stream"
    experts = model.weights.expert_length
    outer = model.weights.outer
    assert outer is not None
    streams = model.needs(Way("gpu-stream", budget=1000))
    assert streams == (vram, outer.embedding_length + 1000)
    assert model.needs(Way("gpu-stream", budget=2 * experts)) == model.needs(model.offloads()[-1])
    reads = model.reads(Way("gpu-stream", budget=1000), 5, 0)
    whole = model.reads(Way("cpu"), 0, 0)
    assert reads is not None
    assert whole is not None
    assert (reads.memory, reads.drive) == (model.step_length, 5)
    assert reads.vram + reads.memory == whole.memory
