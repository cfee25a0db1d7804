"""Texts that go on after a restart of the real server, whatever happens to what it keeps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moepack.common.errors import RequestError
from moepack.pack.opening.open_model import open_model
from moepack.running.serving.client import AnswerFacts, ServerClient
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.prompt_files import stored_prompts
from moepack.running.serving.sampling import Sampling
from moepack.running.streaming.supervisor import StreamingOptions
from tests.support import architectures
from tests.support.children import PATIENCE, wait_until
from tests.support.file_systems import mounted
from tests.support.needs import needs_llama
from tests.support.servers import served

pytestmark = needs_llama

PROMPT = Path("fixtures/prompt.txt").read_text()[:900]
NEXT = " And then?"
MOST_AGAIN = 64
"""Tokens before the end that are computed again with sliding windows: back to a checkpoint."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own; return the folder for states."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moepack/prompts"


def states(cache: Path) -> list[Path]:
    """Return the files of states."""
    return sorted(cache.glob("*/*.state"))


@contextmanager
def keeping(path: Path, *options: str, limit: int | None = 1 << 30) -> Iterator[ModelServer]:
    """Serve a model with the least memory for its experts, and keep states."""
    words = ["-c", "1024", "-t", "1", *options]
    with (
        open_model(path) as pack,
        ModelServer(pack, StreamingOptions("floor"), options=words, prompt_cache=limit) as server,
    ):
        assert server.url
        yield server


def go_on(client: ServerClient, prompt: str | list[int]) -> AnswerFacts:
    """Complete a text without chance."""
    greedy = Sampling(temperature=0)
    with client.complete(prompt, count=12, sampling=greedy) as answer:
        for _ in answer:
            pass
        return answer.facts


def begin(path: Path, *options: str) -> tuple[AnswerFacts, str]:
    """Serve a text, and keep its state; return its facts and the next prompt."""
    with keeping(path, *options) as server:
        begun = go_on(server.client, PROMPT)
    assert begun.prompt_count > 200
    return begun, PROMPT + begun.text + NEXT


def without_restart(path: Path, prompt: str, *options: str) -> str:
    """Return the answer to the next prompt by a server that has begun the text."""
    with keeping(path, *options, limit=0) as server:
        assert go_on(server.client, PROMPT).kept_count == 0
        return go_on(server.client, prompt).text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ("-np", "1")) for name in ("gpt-oss", "deepseek2")),
        *((name, ()) for name in ("qwen3moe", "granite")),
    ],
)
def test_a_text_goes_on_after_a_restart_as_without_one(
    name: str, options: tuple[str, ...], packs: dict[str, Path], cache: Path
) -> None:
    """Also with windows, and with compressed keys and values."""
    begun, prompt = begin(packs[name], *options)
    with keeping(packs[name], *options) as server:
        resumed = go_on(server.client, prompt)
    assert resumed.kept_count >= begun.prompt_count - MOST_AGAIN
    assert resumed.text == without_restart(packs[name], prompt, *options)


@pytest.mark.parametrize("name", ["qwen3next", "lfm2moe"])
def test_a_text_with_states_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Even if it has changed before its end: what was computed for the end cannot be removed."""
    model = architectures.write(name, tmp_path / "model.gguf", context_length=1024)
    tokens = [7 * number % architectures.WORDS for number in range(300)]
    following = [*tokens, *range(1, 10)]
    with keeping(model, limit=0) as server:
        go_on(server.client, tokens)
        expected = go_on(server.client, following)
    with keeping(model) as server:
        go_on(server.client, tokens)
    with keeping(model) as server:
        resumed = go_on(server.client, following)
    assert resumed.kept_count == expected.kept_count > 200
    assert resumed.text == expected.text


def test_of_several_texts_that_with_the_longest_common_beginning_goes_on(
    packs: dict[str, Path], cache: Path
) -> None:
    """Also where one has taken the place of another before it was saved."""
    other = "An entirely different text. " + PROMPT[::-1][:500]
    with keeping(packs["qwen3moe"], "-np", "1") as server:
        first = go_on(server.client, PROMPT)
        second = go_on(server.client, other)
        third = go_on(server.client, PROMPT[:300] + other[:300])
    assert len(states(cache)) == 3
    with keeping(packs["qwen3moe"], "-np", "1") as server:
        for prompt, begun in ((other, second), (PROMPT, first), (other, second)):
            again = go_on(server.client, prompt + begun.text + NEXT)
            assert again.kept_count >= begun.prompt_count
    assert third.prompt_count > 128


def test_chats_of_each_interface_go_on(packs: dict[str, Path], cache: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0}

    def ask(path: str, fields: dict[str, Any]) -> Any:
        with keeping(packs["qwen3moe"], "--chat-template", "chatml") as server:
            answer = httpx.post(server.url + path, json=fields, timeout=PATIENCE)
            assert answer.status_code == 200
            return answer.json()

    chat = ask("/v1/chat/completions", fields)
    assert chat["timings"]["cache_n"] == 0
    messages += [chat["choices"][0]["message"], {"role": "user", "content": NEXT}]
    assert ask("/v1/chat/completions", fields)["timings"]["cache_n"] > 200
    assert ask("/v1/messages", fields)["usage"]["cache_read_input_tokens"] > 200


def test_nothing_but_the_state_of_the_same_model_and_settings_is_used(
    packs: dict[str, Path], cache: Path
) -> None:
    _, prompt = begin(packs["qwen3moe"])
    for options in (("-np", "1"), ("-ctk", "q8_0"), ("--override-kv", "a.b=int:1")):
        with keeping(packs["qwen3moe"], *options) as server:
            assert go_on(server.client, prompt).kept_count == 0
    others = "-b", "256", "-ub", "64", "-c", "768", "-lv", "3"
    with keeping(packs["qwen3moe"], *others) as server:
        assert go_on(server.client, prompt).kept_count > 200
    (folder,) = cache.iterdir()
    folder.rename(cache / "another")
    with keeping(packs["qwen3moe"]) as server:
        assert go_on(server.client, prompt).kept_count == 0


def test_a_damaged_state_is_removed_and_the_text_computed(
    packs: dict[str, Path], cache: Path
) -> None:
    """Each byte of a file is damaged in the tests of files."""
    _, prompt = begin(packs["qwen3moe"])
    with keeping(packs["qwen3moe"], limit=0) as server:
        anew = go_on(server.client, prompt)
    (path,) = states(cache)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with keeping(packs["qwen3moe"]) as server:
        resumed = go_on(server.client, prompt)
        assert (resumed.kept_count, resumed.text) == (0, anew.text)
        assert path not in states(cache)


def test_two_servers_of_a_model_share_states_and_do_not_disturb_each_other(
    packs: dict[str, Path], cache: Path
) -> None:
    begun, prompt = begin(packs["qwen3moe"])
    expected = without_restart(packs["qwen3moe"], prompt)
    with keeping(packs["qwen3moe"]) as one, keeping(packs["qwen3moe"]) as other:
        for server in (one, other, one, other):
            resumed = go_on(server.client, prompt)
            assert resumed.kept_count >= begun.prompt_count
            assert resumed.text == expected
        for path in states(cache):
            path.unlink()
        assert go_on(one.client, prompt + expected + NEXT).text


def test_after_a_kill_what_was_idle_is_kept(packs: dict[str, Path], cache: Path) -> None:
    with keeping(packs["qwen3moe"]) as server:
        begun = go_on(server.client, PROMPT)
        assert not states(cache)
        wait_until(lambda: len(states(cache)) == 1)
        os.kill(server.process_id, signal.SIGKILL)
    assert not list(cache.glob("*/*.partial"))
    with keeping(packs["qwen3moe"]) as server:
        assert go_on(server.client, PROMPT + begun.text + NEXT).kept_count >= begun.prompt_count


def test_a_state_that_is_longer_than_all_may_be_is_a_note(
    packs: dict[str, Path], cache: Path
) -> None:
    with keeping(packs["qwen3moe"], limit=1 << 14) as server:
        begun = go_on(server.client, PROMPT)
        go_on(server.client, NEXT + PROMPT)  # the first one's place is needed
        assert "the state of a text is not saved: it takes" in server.log()
        assert go_on(server.client, NEXT + PROMPT + begun.text).kept_count > 200
    assert not list(cache.glob("*/*"))


def test_a_full_disk_is_a_note(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted("tmpfs", tmp_path / "full", 1 << 17) as full:
        monkeypatch.setenv("XDG_CACHE_HOME", str(full))
        with keeping(packs["qwen3moe"]) as server:
            begun = go_on(server.client, PROMPT)
            wait_until(lambda: "note: the state of a text is not saved" in server.log())
            assert go_on(server.client, PROMPT + begun.text).kept_count > 200
        assert not list(full.glob("moepack/prompts/*/*"))


def test_clients_may_not_read_and_write_what_is_kept(packs: dict[str, Path], cache: Path) -> None:
    with keeping(packs["qwen3moe"]) as server:
        go_on(server.client, PROMPT)
        for text in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000):
            assert httpx.post(f"{server.url}/completion", content=text).status_code == 400
        for path in ("/slots/0", "/%73lots/0", "/slots/%30"):
            for action in ("save", "restore", "erase"):
                with pytest.raises(RequestError, match="slot-save-path"):
                    server.client.request(f"{path}?action={action}", {"filename": "x"})
    (folder,) = cache.iterdir()
    assert [path.suffix for path in folder.iterdir()] == [".state"]


def test_a_client_that_saves_texts_itself_may_and_nothing_else_is_kept(
    packs: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    options = ("-np", "1", "--slot-save-path", str(tmp_path))
    with keeping(packs["qwen3moe"], *options) as server:
        count = go_on(server.client, PROMPT).prompt_count
        saved = server.client.request("/slots/0?action=save", {"filename": "x"})["n_saved"]
        assert saved >= count
        server.client.request("/slots/0?action=erase", {})
        restored = server.client.request("/slots/0?action=restore", {"filename": "x"})
        assert restored["n_restored"] == saved
        assert go_on(server.client, PROMPT).kept_count == count - 1
    assert not states(cache)


def test_what_is_kept_is_private(packs: dict[str, Path], cache: Path) -> None:
    before = os.umask(0)
    try:
        begin(packs["qwen3moe"])
    finally:
        os.umask(before)
    (path,) = states(cache)
    modes = [one.stat().st_mode & 0o777 for one in (cache, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]
    assert stored_prompts() == {path.parent: path.stat().st_size}


def test_the_command_keeps_states_unless_it_is_told_not_to(
    cache: Path, monkeypatch: pytest.MonkeyPatch, chat_path: Path
) -> None:
    monkeypatch.delenv("MOEPACK_PROMPT_CACHE")
    fields = {"prompt": PROMPT, "n_predict": 4, "temperature": 0}

    def ask(*options: str) -> int:
        with served(chat_path, "-c", "1024", "-t", "1", *options) as (process, url):
            answer = httpx.post(f"{url}/completion", json=fields, timeout=PATIENCE).json()
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
            return int(answer["timings"]["cache_n"])

    assert ask("--no-prompt-cache") == 0
    assert not cache.exists()
    assert ask() == 0
    assert ask() > 200
