"""Options with which llama.cpp's server drafts: refused by name where there would be no drafts."""

import json
import re
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.pack.opening.open_model import open_model
from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import footprint_of
from moepack.running.serving.server_memory import MemoryLimits
from moepack.running.serving.server_options import server_options, single_text_server
from tests.support import architectures
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.values import some
from tests.support.warm_command import Run

MODEL = first_shard("qwen3moe")
DRAFT = str(first_shard("ud-mixed"))
DRAFTS = ["--spec-type", "draft-mtp"]
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
            server_options(pack, words)
        assert hint in str(refusal.value.hint)
        with pytest.raises(RequestError, match=problem):
            single_text_server(pack, words, MemoryLimits(), context=64, threads=1, micro_batch=1)


def test_memory_for_a_draft_model_its_context_and_its_buffers_is_left_free() -> None:
    """Its context is as long as the model's, of cells with types of its own."""
    draft = footprint_of(DRAFT)
    context = ContextOptions(512, sequence_count=4, is_unified=True, batch_count=512)
    cells, computing = draft.context(context), draft.compute_length(context)
    short = draft.context(context._replace(type_k="q8_0"))
    words = ["-c", "512", "-ub", "512", "--spec-type"]
    with open_model([MODEL]) as pack:
        without = server_options(pack, [*words, "ngram-mod"]).beside
        for more, added in (([], cells), (["-ctkd", "q8_0"], short)):
            command = [*words, "draft-simple", "-md", DRAFT, *more]
            parts = server_options(pack, command).beside
            assert parts.dense == some(without.dense) + LENGTH
            assert parts.context == some(without.context) + some(added).length
            assert parts.computing == some(without.computing) + some(computing)


def test_what_a_draft_model_of_the_hub_takes_is_unknown() -> None:
    words = ["--spec-type", "draft-simple", "-hfd", "owner/name"]
    with open_model([MODEL]) as pack:
        assert server_options(pack, words).beside.total is None
        with pytest.raises(RequestError, match="not known in all"):
            server_options(pack, words, MemoryLimits(total="1GiB"))


@needs_llama
def test_a_model_with_layers_that_draft_needs_no_other(tmp_path: Path) -> None:
    model = architectures.write("qwen35moe with MTP", tmp_path / "m.gguf")
    with open_model([model]) as pack:
        plain, drafting = (server_options(pack, ["-c", "2048", *more]) for more in ([], DRAFTS))
    assert drafting.words[:4] == ["-c", "2048", *DRAFTS]
    assert some(drafting.beside.context) - some(plain.beside.context) == 1 << 20, "b11549's log"


@needs_llama
def test_run_counts_drafts_and_those_that_its_text_has(cli: Run) -> None:
    small = ("--memory", "floor", "-c", "256", "--temp", "0")
    words = ("run", MODEL, "-p", "Hello", "-n", "20", *small)
    drafting = ("--", "-md", DRAFT, "--spec-type", "draft-simple", "--spec-draft-n-max", "2")
    plain, drafted = (json.loads(cli(*words, "--json", *more).stdout) for more in ((), drafting))
    assert drafted["text"] == plain["text"]
    assert plain["draft_count"] == 0
    assert 0 < drafted["accepted_count"] <= drafted["draft_count"]
    assert (drafted["draft_hits"], drafted["draft_misses"]) == (0, 0), "it reads its own experts"
    assert re.search(r"; \d+ of \d+ drafts accepted\n", cli(*words, *drafting).stderr)
