"""Options with which llama.cpp's server drafts: refused by name where there would be no drafts."""

import json
import re
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.pack.opening.open_model import open_model
from moepack.running.serving.server_options import server_options, single_text_server
from tests.support import architectures
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.warm_command import Run

MODEL = first_shard("qwen3moe")
DRAFT = str(first_shard("ud-mixed"))
LENGTH = sum(one.stat().st_size for one in MODEL.parent.glob("qwen3moe-ud-mixed-*"))


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["--spec-type", "draft-mtp"], "no layers for multi-token prediction", "draft-simple -md"),
        (["--spec-type=draft-simple"], "draft-simple needs a model that drafts", "-md DRAFT.gguf"),
        (["--spec-type", "ngram-mod,draft-eagle3"], "draft-eagle3 needs a model", "-md DRAFT.gguf"),
        (["-md", DRAFT], "without a --spec-type", "--spec-type draft-simple"),
        (["-md", DRAFT, "--spec-type", "ngram-mod"], "without a --spec-type", "draft-simple"),
    ],
)
def test_options_without_an_effect_are_refused(words: list[str], problem: str, hint: str) -> None:
    with open_model([MODEL]) as pack:
        with pytest.raises(RequestError, match=problem) as refusal:
            server_options(pack, words, None, 0)
        assert hint in str(refusal.value.hint)
        with pytest.raises(RequestError, match=problem):
            single_text_server(pack, words, None, 0, context=64, threads=1, micro_batch=1)


def test_a_variable_counts_as_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-mtp")
    with open_model([MODEL]) as pack, pytest.raises(RequestError, match="draft-mtp"):
        server_options(pack, [], None, 0)


def test_memory_for_a_draft_model_is_left_free() -> None:
    with open_model([MODEL]) as pack:
        _, without = server_options(pack, ["--spec-type", "ngram-mod"], None, 0)
        words = ["-md", DRAFT, "--spec-type", "draft-simple"]
        assert server_options(pack, words, None, 0)[1] == without + LENGTH


@needs_llama
def test_a_model_with_layers_that_draft_needs_no_other(tmp_path: Path) -> None:
    model = architectures.write("qwen35moe with MTP", tmp_path / "m.gguf")
    with open_model([model]) as pack:
        words, _ = server_options(pack, ["--spec-type", "draft-mtp"], None, 0)
    assert words[:2] == ["--spec-type", "draft-mtp"]


@needs_llama
def test_run_counts_drafts_and_those_that_its_text_has(cli: Run) -> None:
    words = (
        "run",
        MODEL,
        "-p",
        "Hello",
        "-n",
        "20",
        "--memory",
        "floor",
        "--temp",
        "0",
        "-c",
        "256",
    )
    drafting = (*words, "-md", DRAFT, "--spec-type", "draft-simple", "--spec-draft-n-max", "2")
    plain, drafted = (json.loads(cli(*one, "--json").stdout) for one in (words, drafting))
    assert drafted["text"] == plain["text"]
    assert plain["draft_count"] == 0
    assert 0 < drafted["accepted_count"] <= drafted["draft_count"]
    assert (drafted["draft_hits"], drafted["draft_misses"]) == (0, 0), "it reads its own experts"
    assert re.search(r"; \d+ of \d+ drafts accepted\n", cli(*drafting).stderr)
