"""The command `serve`: it says where it is, and ends when it is told to."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.children import PATIENCE
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]
SMALL = ("--memory", "floor", "--context", "2048", "--threads", "1")
SHARD = first_shard("qwen3moe")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(stop: signal.Signals, tmp_path: Path) -> None:
    trace = tmp_path / "t.moetrace"
    arguments = ["serve", str(SHARD), "--port", "0", "--trace", str(trace), *SMALL]
    command = [sys.executable, "-m", "moepack", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("memory: ")
        said = process.stderr.readline()
        match = re.fullmatch(r"serving (\S+) at (http://127.0.0.1:\d+)/v1; Ctrl-C ends it\n", said)
        assert match, said
        assert match[1] == SHARD.name
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{match[2]}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        process.send_signal(stop)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
    assert trace.stat().st_size > 0


@pytest.mark.parametrize(("key", "notes"), [((), 1), (("--api-key", "sesame"), 0)])
def test_who_serves_everybody_is_told_so(key: tuple[str, ...], notes: int) -> None:
    arguments = ["serve", str(SHARD), "--host", "0.0.0.0", "--port", "0", *key, *SMALL]
    command = [sys.executable, "-m", "moepack", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(notes + 2)]
        process.terminate()
    assert sum(line.startswith("note: without --api-key") for line in said) == notes
    assert said[-1].startswith("serving ")


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPACK_API_KEY", "sesame")
    command = [sys.executable, "-m", "moepack", "serve", str(SHARD), "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = re.findall(r"http://\S+/v1", process.stderr.readline() + process.stderr.readline())[0]
        try:
            assert httpx.get(f"{url}/models").status_code == 401
            headers = {"Authorization": "Bearer sesame"}
            assert httpx.get(f"{url}/models", headers=headers).status_code == 200
        finally:
            process.terminate()


def test_a_model_with_a_hostile_name_is_served_under_one_that_can_be_said(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\nb\udcff"
    folder.mkdir()
    for shard in shards_of("qwen3moe"):
        (folder / Path(shard).name).symlink_to(shard)
    command = [sys.executable, "-m", "moepack", "serve", str(folder), "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        _, said = process.stderr.readline(), process.stderr.readline()
        try:
            name = r"a\x1b[2J\nb\udcff"
            assert said.startswith(f"serving {name} at http://")
            (url,) = re.findall(r"http://\S+/v1", said)
            assert httpx.get(f"{url}/models").json()["data"][0]["id"] == name
            assert httpx.get(f"{url}/models/{quote(name)}").status_code == 200
        finally:
            process.terminate()


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
