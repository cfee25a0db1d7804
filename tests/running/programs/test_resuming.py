"""A conversation goes on after the server was stopped, from the state that it saved to disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack
from moepack.running.pager.pager import PagerOptions
from moepack.running.programs.client import AnswerFacts, ServerClient
from moepack.running.programs.model_server import ModelServer
from moepack.running.programs.sampling import Sampling
from tests.support.needs import needs_llama

pytestmark = needs_llama

STATE = "conversation.bin"
SAVE = "/slots/0?action=save"
PROMPT = Path("fixtures/prompt.txt").read_text()[:500]
NEXT = " And then?"
MOST_AGAIN = 64
"""Tokens before the end of a saved state that are computed again with sliding windows: back to
the last checkpoint."""


@contextmanager
def serving(pack: Path, *options: str) -> Iterator[ServerClient]:
    """Serve a pack with the least memory for its experts, to one text at a time."""
    words = ["-c", "1024", "-np", "1", "-t", "1", *options]
    with Pack(pack) as opened, ModelServer(opened, PagerOptions("floor"), options=words) as server:
        yield server.client


def go_on(client: ServerClient, prompt: str) -> AnswerFacts:
    with client.complete(prompt, count=12, sampling=Sampling(temperature=0)) as answer:
        for _ in answer:
            pass
        return answer.facts


@pytest.mark.parametrize("name", ["qwen3moe", "granite", "gpt-oss", "deepseek2"])
def test_a_conversation_goes_on_after_a_restart_and_is_not_computed_again(
    name: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    """Also where layers look back on a window, and where keys and values are compressed."""
    options = ("--slot-save-path", str(tmp_path))
    with serving(packs[name], *options) as client:
        begun = go_on(client, PROMPT)
        count = client.request(SAVE, {"filename": STATE})["n_saved"]
        prompt = PROMPT + begun.text + NEXT
        expected = go_on(client, prompt)
    assert count >= begun.prompt_count > 100
    with serving(packs[name], *options) as client:
        restored = client.request("/slots/0?action=restore", {"filename": STATE})
        assert restored["n_restored"] == count
        resumed = go_on(client, prompt)
    assert resumed.text == expected.text
    assert resumed.kept_count >= begun.prompt_count - MOST_AGAIN
    assert resumed.prompt.step_count == resumed.prompt_count - resumed.kept_count
    with serving(packs[name]) as client:
        assert go_on(client, prompt).kept_count == 0  # nothing else had kept it


def test_saving_without_a_folder_is_refused_with_the_option_that_gives_one(
    packs: dict[str, Path],
) -> None:
    with serving(packs["qwen3moe"]) as client, pytest.raises(RequestError, match="slot-save-path"):
        client.request(SAVE, {"filename": STATE})
