"""A model of any architecture runs from a pack as llama.cpp alone runs it, or is refused."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import moepack
from moepack.errors import MachineError, MoepackError, SourceError
from moepack.llama_cpp import library
from moepack.llama_cpp.structs import ContextParams
from moepack.running.engine import Engine
from tests.support import architectures
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.models import pack_model
from tests.support.needs import needs_llama
from tests.support.runs import BATCHES, LEAST, engine_of, given_up_layers, loaded, run

pytestmark = needs_llama

REFUSED = {
    "llada-moe": (SourceError, "makes no text"),  # it fills gaps in one
    "rnd1": (SourceError, "makes no text"),
    "refact": (MachineError, "routers of other layers, expected .0, 1, 2., found .."),
}
"""Of those that llama.cpp loads. In refact's graph are no experts."""
QUICK = {
    "deepseek2 with groups",
    "deepseek4",  # some of its experts follow from the token
    "gemma4",  # gate and up in one, and scales
    "glm4moe with MTP",
    "gpt-oss with scales",  # and biases
    "granitehybrid",
    "grovemoe",  # experts that groups of others share
    "jamba",
    "k2-horizon",  # experts in attention
    "kimi-k3",  # experts narrower than the rest
    "lfm2moe",
    "llama4",  # experts in each second layer
    "minimax-01",
    "nemotron_h_moe with a width for each layer",
    "qwen2moe",
    "qwen3next with MTP",
}
STATEFUL = ["granitehybrid", "jamba", "lfm2moe", "qwen3next with MTP"]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=() if model in QUICK else pytest.mark.slow)
        for model in sorted(architectures.MODELS.keys() - REFUSED)
    ],
)
def test_logits_are_those_of_the_loaded_model(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path) as engine:
        found = run(engine)
        assert given_up_layers(engine) == engine.shape.routed.keys()
        assert engine.usage.tally.miss_count > len(engine._places), "none came twice"
        batch_count, layers = engine.batch_count, list(engine.shape.routed)
    expected = loaded(tmp_path / "m.gguf", batch_count)
    assert all(map(np.array_equal, found, expected))
    for layer in layers:
        assert not np.array_equal(without_experts_of(layer, model, tmp_path), expected[0])


def without_experts_of(layer: int, model: str, folder: Path) -> NDArray[np.float32]:
    """Return the logits behind the first batch when no expert of a layer is brought."""
    with engine_of(model, folder) as engine:
        hold = engine._store.hold
        engine._routers.met = lambda met, chosen: None if met == layer else hold(met, chosen)
        engine.feed(BATCHES[0])
        return engine.logits()


@pytest.mark.parametrize("layout", ["layers", "natural"])
@pytest.mark.parametrize("model", ["gemma4", "grovemoe", "k2-horizon", "qwen3next with MTP"])
def test_packs_of_them_give_the_same(model: str, layout: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path) as engine:
        right = run(engine)
    pack_model([tmp_path / "m.gguf"], tmp_path / "pack", layout)
    with moepack.open(tmp_path / "pack") as pack, Engine(pack, LEAST) as engine:
        assert all(map(np.array_equal, run(engine), right))


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_run_is_refused(model: str, tmp_path: Path) -> None:
    kind, words = REFUSED[model]
    with pytest.raises(MoepackError, match=words) as refused, engine_of(model, tmp_path) as engine:
        engine.feed([5])
    assert type(refused.value) is kind


def test_a_router_that_chooses_twice_in_a_step_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_context = library.load().llama_init_from_model

    def of_single_tokens(model: int, params: ContextParams) -> int | None:
        params.n_ubatch = 1
        address: int | None = make_context(model, params)
        return address

    monkeypatch.setattr(library.load(), "llama_init_from_model", of_single_tokens)
    # Its last layer runs for each token, whether or not anybody asked what comes after it.
    with engine_of("deepseek4", tmp_path, LEAST._replace(memory=None)) as engine:
        engine.feed([5])
        with pytest.raises(MachineError, match="layer 0: the router chose twice in one step"):
            engine.feed([5, 6])
        assert not engine.tokens


@pytest.mark.parametrize("model", STATEFUL)
def test_a_model_that_keeps_a_state_forgets_all_when_it_goes_back(
    model: str, tmp_path: Path
) -> None:
    with engine_of(model, tmp_path) as engine:
        right = run(engine)
        engine.rewind(len(engine.tokens))
        assert engine.tokens
        engine.rewind(len(BATCHES[0]))
        assert not engine.tokens
        for batch, expected in zip(BATCHES, right, strict=True):
            engine.feed(batch)
            assert np.array_equal(engine.logits(), expected)


@pytest.mark.parametrize("model", STATEFUL)
def test_a_step_that_failed_leaves_no_state_behind(model: str, tmp_path: Path) -> None:
    with engine_of(model, tmp_path) as engine:
        right = run(engine)
    fault = Fault(code=5, times=0)
    options = LEAST._replace(backend=FaultyBackend(make("buffered"), fault))
    with engine_of(model, tmp_path, options) as engine:
        engine.feed(BATCHES[0])
        fault.times = 1
        with pytest.raises(MachineError, match="cannot read"):
            feed_the_rest(engine)
        assert not engine.tokens
        for batch, expected in zip(BATCHES, right, strict=True):
            engine.feed(batch)
            assert np.array_equal(engine.logits(), expected)


def feed_the_rest(engine: Engine) -> None:
    for batch in BATCHES[1:]:
        engine.feed(batch)
