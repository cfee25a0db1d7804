"""The command `serve`: llama.cpp's own server, with the experts of a model brought to it."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import PATIENCE
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]
SMALL = ("--memory", "floor", "--context", "256", "--threads", "1")
SHARD = first_shard("qwen3moe")


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a model by the command; give its process and its address."""
    command = [sys.executable, "-m", "moepack", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on http://"), process.stderr.read()
            yield process, line.split()[-1]
        finally:
            process.terminate()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(stop: signal.Signals) -> None:
    with served(SHARD, *SMALL) as (process, url):
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["model"] == SHARD.name
        process.send_signal(stop)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert lines[0].startswith("memory for experts: ")
    assert re.match(r"experts: [0-9.]+% of \d+ lookups hit, ", lines[-1]), lines[-1]


def test_options_behind_the_dashes_are_the_servers_own() -> None:
    with served(SHARD, *SMALL, "--", "-np", "2", "--metrics") as (_, url):
        assert httpx.get(f"{url}/props").json()["total_slots"] == 2
        assert "llamacpp:" in httpx.get(f"{url}/metrics").text


def test_options_that_people_know_may_be_typed_before_the_dashes(tmp_path: Path) -> None:
    options = ("-np", "2", "--metrics", "--chat-template", "llama2", "--ctx-size", "0")
    with served(SHARD, "--memory", "floor", "-t", "1", *options) as (_, url):
        properties = httpx.get(f"{url}/props").json()
        assert properties["total_slots"] == 2
        body = {"messages": [{"role": "user", "content": "hello"}]}
        prompt = httpx.post(f"{url}/apply-template", json=body).json()["prompt"]
        assert "[INST] hello" in prompt
        assert "llamacpp:" in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("context", "length", "notes"),
    [
        ((), 2048, 0),
        (("-c", "9000"), 2048, 1),
        (("-c", "512"), 512, 0),
        (("-c", "9000", "-q"), 2048, 0),
    ],
)
def test_a_context_is_no_longer_than_the_model_was_trained_for(
    context: tuple[str, ...], length: int, notes: int
) -> None:
    options = ("--memory", "floor", "-t", "1", *context, "--", "-np", "1")
    with served(SHARD, *options) as (process, url):
        slot = httpx.get(f"{url}/slots").json()[0]
        assert slot["n_ctx"] == length
        process.terminate()
        assert process.stderr is not None
        assert process.stderr.read().count("note: the model was trained for 2,048 tokens") == notes


@pytest.mark.parametrize(("key", "notes"), [((), 1), (("--api-key", "sesame"), 0)])
def test_who_serves_everybody_is_told_so(key: tuple[str, ...], notes: int) -> None:
    with served(SHARD, "--host", "0.0.0.0", *key, *SMALL) as (process, _):
        process.terminate()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert sum(line.startswith("note: without --api-key") for line in lines) == notes


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame")
    with served(SHARD, *SMALL) as (_, url):
        assert httpx.get(f"{url}/props").status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        assert httpx.get(f"{url}/props", headers=headers).status_code == 200


def test_a_model_with_a_hostile_name_is_served_under_one_that_can_be_said(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\nb\udcff"
    folder.mkdir()
    for shard in shards_of("qwen3moe"):
        (folder / Path(shard).name).symlink_to(shard)
    with served(folder, *SMALL) as (_, url):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        assert model == r"a\x1b[2J\nb\udcff"


def test_what_is_wrong_is_said(moepack_command: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = moepack_command("serve", SHARD, "--port", port, *SMALL)
    assert run.returncode == 6
    problem = f"cannot listen at 127.0.0.1 port {port}: Address already in use"
    assert f"error: {problem}\n" in run.stderr
    run = moepack_command("serve", SHARD, "--host", "no.such.host.example", *SMALL)
    assert run.returncode == 6
    run = moepack_command("serve", SHARD, "--api-key", "", "--port", "0", *SMALL)
    assert run.returncode == 2
    run = moepack_command("serve", SHARD, *SMALL, "--", "-np", "2", "--port", "8081")
    assert run.returncode == 2
    assert "error: --port goes before --, not behind it\n" in run.stderr
    run = moepack_command("serve", SHARD, *SMALL, "-ngl", "99")
    assert run.returncode == 2
    assert f"hint: for a GPU: moepack run {SHARD} -- llama-server -m {{}} -ngl 99\n" in run.stderr
