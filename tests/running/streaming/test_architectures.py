"""A model of any architecture gives the logits that it gives alone, with its experts brought."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moepack.common.shape import ROUTED_FAMILY
from moepack.pack.opening.open_model import open_model
from moepack.packing.pack_model import pack_model
from moepack.running.programs.runner import preloaded_library
from moepack.running.streaming.control import ExpertUsage
from tests.support import architectures
from tests.support.llama_cpp import Floats
from tests.support.logits_program import BATCH_COUNT, compute
from tests.support.needs import needs_llama, require_llama
from tests.support.supervised import Program, supervised

pytestmark = needs_llama

NO_TEXT = {"llada-moe", "rnd1"}
"""They fill gaps in a text: there is nothing behind a batch."""
NONE_TWICE = {"refact", "nemotron_h_moe with scales"}
"""The graph of one has no experts; the routers of the other select few."""
NO_ROUTERS = {"refact", "nemotron_h_moe", "nemotron_h_moe with MTP", "nemotron_h_moe with scales"}
"""Nothing is guessed: no layer with experts, or only one that is computed for one token."""
OTHER_ROUTERS = {name for name in architectures.MODELS if name.startswith("deepseek4")}
"""Some of their layers select by what a token is."""


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """Start a program that any supervisor can serve."""
    require_llama()
    library = str(preloaded_library())
    with Program("", module="logits_program", LD_PRELOAD=library) as one:
        yield one


def run(program: Program, path: Path, folder: Path) -> tuple[Floats, ExpertUsage]:
    """Return a model's logits with its experts brought, in the least memory, and the usage."""
    with supervised(path, memory="floor", micro_batch=BATCH_COUNT) as serving:
        supervisor, target = serving.supervisor, folder / "logits.npy"
        arguments = (supervisor.model_path, supervisor.environment, str(target))
        assert program.call(*arguments) == 0, program.complaint
        assert not serving.failures
        return np.load(target), supervisor.usage


def models() -> Iterator[Any]:
    """Yield each model with its form, of which one in turn is left to the longest run of tests."""
    for number, model in enumerate(sorted(architectures.MODELS.keys() - NO_TEXT)):
        forms = ["gguf", "pack"] if number % 2 else ["pack", "gguf"]
        yield pytest.param(model, forms[0])
        yield pytest.param(model, forms[1], marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "kind"), [*models()])
def test_logits_are_those_of_the_model_alone(
    program: Program, model: str, kind: str, tmp_path: Path
) -> None:
    path = architectures.write(model, tmp_path / "m.gguf")
    expected = compute(path)
    if kind == "pack":
        pack_model(path, tmp_path / "pack")
        path = tmp_path / "pack"
    logits, usage = run(program, path, tmp_path)
    assert np.array_equal(logits, expected)
    with open_model([path]) as pack:
        layers = pack.shape.without_mtp().routed
        expert_count = sum(pack.expert_count(layer, family=ROUTED_FAMILY) for layer in layers)
        has_others = {name for layer in layers for name in pack.families(layer)} != {ROUTED_FAMILY}
    if kind == "pack":
        # Experts that no router of ffn_moe_topk-N chooses come when they are read.
        assert bool(usage.fault_count) == has_others
        return
    if model not in NONE_TWICE:
        assert usage.miss_count > expert_count, "none came twice"
    if model not in NO_ROUTERS:
        assert usage.prefetches.control_right_count > 0, "its routers are not understood"
    assert usage.prefetches.is_off == (model in OTHER_ROUTERS)


def test_a_router_that_chooses_twice_in_a_call_has_chosen_once(
    program: Program, tmp_path: Path
) -> None:
    path = architectures.write("grovemoe", tmp_path / "m.gguf")
    with supervised(path, memory="floor", micro_batch=BATCH_COUNT, records=True) as serving:
        arguments = (
            serving.supervisor.model_path,
            serving.supervisor.environment,
            str(tmp_path / "l.npy"),
        )
        assert program.call(*arguments) == 0, program.complaint
        calls = serving.supervisor.pop_calls(with_open=True)
    lengths = [[len(rows) for rows in call.layers.values()] for call in calls]
    assert lengths == [[2, 2, 1]] * 4 + [[1, 1, 1]] * 12
    assert max(int(call.layers[0].max()) for call in calls) > 3, "not those that others share"
