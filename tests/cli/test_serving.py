"""The command `serve`: llama.cpp's own server, with the experts of a model brought to it."""

import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import architectures
from tests.support.children import PATIENCE
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama
from tests.support.servers import served

pytestmark = [pytest.mark.long, needs_llama]
SMALL = ("--memory", "floor", "--context", "256", "--threads", "1")
SHARD = first_shard("qwen3moe")


@pytest.mark.parametrize(
    ("stop", "context", "length", "note_count"),
    [(signal.SIGINT, (), 2048, 0), (signal.SIGTERM, ("-c", "9000"), 2048, 1)],
)
def test_it_serves_until_it_is_told_to_end(
    stop: signal.Signals, context: tuple[str, ...], length: int, note_count: int
) -> None:
    """With a context that is no longer than the model was trained for."""
    options = ("--memory", "floor", "-t", "1", *context, "--", "-np", "1")
    with served(SHARD, *options) as (process, url):
        assert httpx.get(f"{url}/slots").json()[0]["n_ctx"] == length
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["model"] == SHARD.name
        process.send_signal(stop)
        assert process.wait(PATIENCE) == 0
        lines = process.stderr.read().splitlines()
    notes = [line for line in lines if "note: the model was trained for 2,048 tokens" in line]
    assert len(notes) == note_count
    assert any(line.startswith("memory for experts: ") for line in lines)
    assert any(re.match(r"experts: [0-9.]+% of \d+ lookups hit, ", line) for line in lines)


def test_a_context_is_longer_where_tokens_are_wanted(tmp_path: Path) -> None:
    model = architectures.write("qwen3moe", tmp_path / "m.gguf", context_length=1 << 14)
    for words, length in (((), 4096), (("--wanted-context", "8192"), 8192)):
        with served(model, "--memory", "floor", "-t", "1", *words) as (_, url):
            assert httpx.get(f"{url}/slots").json()[0]["n_ctx"] == length


def test_options_of_the_server_stand_behind_the_dashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the key comes from the environment."""
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame")
    options = ("--chat-template", "llama2", "-c", "512", "-q", "--", "-np", "2", "--metrics")
    headers = {"Authorization": "Bearer sesame"}
    with served(SHARD, "--memory", "floor", "-t", "1", *options) as (process, url):
        assert httpx.get(f"{url}/props").status_code == 401
        with httpx.Client(base_url=url, headers=headers) as client:
            assert client.get("/props").json()["total_slots"] == 2
            assert client.get("/slots").json()[0]["n_ctx"] == 256
            body = {"messages": [{"role": "user", "content": "hello"}]}
            assert "[INST] hello" in client.post("/apply-template", json=body).json()["prompt"]
            assert "llamacpp:" in client.get("/metrics").text
        process.terminate()
        assert "note: llama.cpp's template llama2 is not Jinja, and has no tools" in (
            process.stderr.read()
        )


def test_images_are_refused_by_name_and_a_projector_beside_the_model_is_named(
    tmp_path: Path,
) -> None:
    """Small ones by llama.cpp, and long requests before they reach it."""
    for shard in shards_of("qwen3moe"):
        (tmp_path / Path(shard).name).symlink_to(shard)
    projector = tmp_path / "mmproj-F16.gguf"
    projector.write_bytes(b"GGUF")
    with served(tmp_path / SHARD.name, *SMALL) as (process, url):
        for length, code, words in (
            (500, 500, "image input is not supported"),
            (2 << 20, 413, "--mmproj"),
        ):
            image = {"url": f"data:image/png;base64,{'A' * length}"}
            content = [{"type": "image_url", "image_url": image}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == code
            assert words in answer.json()["error"]["message"]
        process.terminate()
        lines = process.stderr.read().splitlines()
    notes = [line for line in lines if line.startswith("note: images")]
    assert notes == [f"note: images are refused; with `-- --mmproj {projector}` they are read"]


def test_origins_are_named_before_the_dashes_or_behind_them() -> None:
    for words in (("--cors-origins", "https://a.example"), ("--", "--cors-origins", "*")):
        with served(SHARD, *SMALL, *words) as (_, url):
            answer = httpx.get(f"{url}/health", headers={"Origin": "https://a.example"})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(("key", "note_count"), [((), 1), (("--api-key", "sesame"), 0)])
def test_who_serves_everybody_is_told_so(
    key: tuple[str, ...], note_count: int, tmp_path: Path
) -> None:
    """Also a model with a hostile name, which is served under one that can be said."""
    folder = tmp_path / "a\x1b[2J\nb\udcff"
    folder.mkdir()
    for shard in shards_of("qwen3moe"):
        (folder / Path(shard).name).symlink_to(shard)
    with served(folder, "--host", "0.0.0.0", *key, *SMALL) as (process, url):
        if not key:
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            assert model == r"a\x1b[2J\nb\udcff"
        process.terminate()
        lines = process.stderr.read().splitlines()
    assert sum(line.startswith("note: without --api-key") for line in lines) == note_count
