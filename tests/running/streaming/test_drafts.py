"""Drafts, by layers for multi-token prediction or by another model: the text stays the same."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.packing.pack_model import pack_model
from moepack.running.serving import model_server
from moepack.running.serving.model_server import ServerProcess
from tests.support import architectures
from tests.support.models import first_shard
from tests.support.needs import require_llama

DRAFTING = ["--spec-type", "draft-mtp"]
DRAFTING_MODELS = ("deepseek2", "nemotron_h_moe", "qwen3next")
OTHER_MODELS = (
    *("bailingmoe3", "cohere2moe", "deepseek32", "glm-dsa", "glm5-next", "hy_v3", "qwen4exp"),
    "step35",
)
"""Models with layers that llama.cpp b11549 lets draft; it aborts with our glm4moe and others."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llama()
    return architectures.write("qwen35moe with MTP", tmp_path_factory.mktemp("mtp") / "m.gguf")


def complete(url: str, prompt: Sequence[int] = [1, 5, 9, 44, 7, 8] * 12) -> dict[str, Any]:
    fields = {"prompt": prompt, "n_predict": 24, "temperature": 0}
    fields |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    with urllib.request.urlopen(f"{url}/completion", json.dumps(fields).encode()) as reply:
        return dict(json.load(reply))


def test_experts_of_drafts_are_announced_and_stay_within_the_memory(
    gguf: Path, comparing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none takes the place of one that the model computes with: each step's are compared."""
    monkeypatch.setattr(model_server, "preloaded_library", lambda: comparing)
    options = ["-np", "1", "-c", "256", "-b", "64", "-ub", "8"]
    pack_model(gguf, tmp_path / "pack")
    with ServerProcess(str(gguf), options=options) as alone:
        expected = complete(alone.url)
    for model, more in ((gguf, []), (gguf, DRAFTING), (tmp_path / "pack", DRAFTING)):
        with moepack.serve(model, memory="floor", options=[*options, *more]) as server:
            answer, usage = complete(server.url), server.usage
        assert answer["tokens"] == expected["tokens"]
        assert bool(answer["timings"].get("draft_n")) == bool(more)
        assert usage.fault_count == 0
        assert usage.resident_length <= usage.budget
        least = 2 * 24 if more else 0  # two experts of a layer for each draft
        assert usage.draft_hit_count + usage.draft_miss_count >= least
        assert bool(usage.draft_hit_count) == bool(usage.draft_miss_count) == bool(more)


@pytest.mark.parametrize(
    "name", [*DRAFTING_MODELS, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_MODELS)]
)
def test_all_models_with_such_layers_draft_as_alone(name: str, tmp_path: Path) -> None:
    require_llama()
    path = architectures.write(f"{name} with MTP", tmp_path / "m.gguf")
    options = ["-np", "1", "-c", "256", "-b", "64", "-ub", "8", *DRAFTING]
    with ServerProcess(str(path), options=options) as alone:
        expected = complete(alone.url)
    with moepack.serve(path, memory="floor", options=options, learn=False) as server:
        answer, usage = complete(server.url), server.usage
    assert answer["tokens"] == expected["tokens"]
    for count in ("draft_n", "draft_n_accepted"):
        assert answer["timings"][count] == expected["timings"][count]
    assert usage.draft_hit_count + usage.draft_miss_count > 0
    assert usage.fault_count == 0


def test_memory_for_all_is_enough_without_the_experts_of_drafts(gguf: Path) -> None:
    options = ["-np", "1", "-c", "256", "-ub", "64"]
    with moepack.serve(gguf, memory="8MiB", options=options) as server:
        complete(server.url)
        usage = server.usage
    assert usage.holds_all
    assert 0 < usage.miss_count <= 3 * 8, "nothing is announced any more"


def test_experts_of_drafts_are_announced_though_all_others_stay(gguf: Path) -> None:
    options = ["-np", "1", "-c", "256", "-ub", "64", *DRAFTING]
    with moepack.serve(gguf, memory="8MiB", options=options) as server:
        complete(server.url)
        complete(server.url, [7, 99, 3] * 30)
        usage = server.usage
    assert usage.holds_all
    assert usage.draft_hit_count > usage.draft_miss_count > 4
    assert usage.fault_count == 0


def routed_count(timings: dict[str, Any]) -> int:
    """Return how many tokens the model computed for `complete`, drafts among them."""
    step_count = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
    return int(timings["prompt_n"] + step_count + timings["draft_n"])


def test_selections_of_a_draft_model_are_its_own() -> None:
    require_llama()
    model, draft = first_shard("qwen3moe"), first_shard("ud-mixed")
    options = ["-np", "1", "-c", "256", "-ub", "8"]
    with ServerProcess(str(model), options=options) as alone:
        expected = complete(alone.url)
    options += ["-md", str(draft), "--spec-type", "draft-simple"]
    with moepack.serve(model, memory="floor", options=options, learn=False) as server:
        _, before = server.url, server.usage
        answer, usage = complete(server.url), server.usage
    assert answer["tokens"] == expected["tokens"]
    assert usage.routed_count - before.routed_count == routed_count(answer["timings"])
