"""Experts of layers for multi-token prediction: counted, evicted and read as all others are."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.packing.pack_model import pack_model
from moepack.running.programs.model_server import ServerProcess
from tests.support import architectures
from tests.support.needs import require_llama

DRAFTING = ["--spec-type", "draft-mtp"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llama()
    return architectures.write("qwen35moe with MTP", tmp_path_factory.mktemp("mtp") / "m.gguf")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, gguf: Path) -> Path:
    """Return the model as it lies, or packed."""
    if request.param == "pack" and not gguf.with_name("pack").exists():
        pack_model(gguf, gguf.with_name("pack"))
    return gguf if request.param == "gguf" else gguf.with_name("pack")


in_both_forms = pytest.mark.parametrize("model", ["gguf", "pack"], indirect=True)


def complete(url: str) -> dict[str, Any]:
    fields = {"prompt": [1, 5, 9, 44, 7, 8] * 12, "n_predict": 24, "temperature": 0}
    fields |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    with urllib.request.urlopen(f"{url}/completion", json.dumps(fields).encode()) as reply:
        return dict(json.load(reply))


@in_both_forms
def test_experts_of_drafts_are_announced_and_stay_within_the_memory(
    gguf: Path, model: Path
) -> None:
    options = ["-np", "1", "-c", "256", "-b", "64", "-ub", "8"]
    with ServerProcess(str(gguf), options=options) as alone:
        expected = complete(alone.url)
    lookups = []
    for more in ([], DRAFTING):
        with moepack.serve(model, memory="floor", options=[*options, *more]) as server:
            answer, usage = complete(server.url), server.usage
        assert answer["tokens"] == expected["tokens"]
        assert bool(answer["timings"].get("draft_n")) == bool(more)
        assert usage.fault_count == 0
        assert usage.resident_length <= usage.budget
        lookups.append(usage.hit_count + usage.miss_count)
    assert lookups[1] > lookups[0] + 2 * 24, "two experts of a layer more for each token"


@in_both_forms
def test_memory_for_all_is_enough_without_the_experts_of_drafts(model: Path) -> None:
    options = ["-np", "1", "-c", "256", "-ub", "64"]
    with moepack.serve(model, memory="8MiB", options=options) as server:
        complete(server.url)
        usage = server.usage
    assert usage.holds_all
    assert 0 < usage.miss_count <= 3 * 8, "nothing is announced any more"
