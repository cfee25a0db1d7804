"""`--server`: `serve` and `run` by a llama-server of one's own."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from moepack.cli.running.models import find_server
from moepack.host.gpus import has_gpu
from tests.support.children import PATIENCE, wait_until
from tests.support.installed_servers import our_server
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.servers import served
from tests.support.warm_command import Run

SHARD = first_shard("qwen3moe")
SMALL = ("--memory", "floor", "--context", "256", "--threads", "1")
BODY = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return our_server(tmp_path_factory.mktemp("installed"))


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


@pytest.mark.long
@needs_llama
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_it_serves_with_experts_that_are_read_and_ends_with_the_command(
    program: Path, stop: signal.Signals
) -> None:
    """The last signal goes to the gate alone, in which nothing can then be cleaned up."""
    with served(SHARD, "--server", str(program), *SMALL) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE).json()
        assert answer["usage"]["completion_tokens"] == 5
        metrics = httpx.get(f"{url}/metrics").text
        misses = re.findall(r"^moepack_experts_misses_total ([0-9]+)", metrics, re.MULTILINE)
        assert len(misses) == 2, "of the gate, and of the one that our own has in place of it"
        assert misses[0] == misses[1] != "0"
        (gate,) = children_of(process.pid)
        (server,) = children_of(gate)
        if stop == signal.SIGKILL:
            os.kill(gate, stop)
        else:
            process.send_signal(stop)
        assert process.wait(PATIENCE) == (-stop if stop == signal.SIGKILL else 0)
        wait_until(lambda: not Path(f"/proc/{server}").exists())
        assert " lookups hit, " in process.stderr.read()


@pytest.mark.long
@needs_llama
def test_an_answer_is_that_of_our_own(cli: Run, program: Path) -> None:
    words = ("run", SHARD, "-p", "Hello", "-n", "5", "--temperature", "0", *SMALL)
    ours, installed = cli(*words), cli(*words, "--server", program)
    assert installed.returncode == 0, installed.stderr
    assert installed.stdout == ours.stdout
    assert " hits, " in installed.stderr


@needs_llama
@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("--server", "no-such-server"), 127, "no such program"),
        (("--server", "docker"), 126, "in containers"),
        (("--server", "llama-server", "--", "true"), 2, "--server is not for a program of one's"),
    ],
)
def test_what_cannot_serve_is_refused(
    cli: Run, words: tuple[str, ...], code: int, complaint: str, tmp_path: Path
) -> None:
    docker = tmp_path / "docker"
    docker.touch(0o755)
    words = tuple(str(docker) if word == "docker" else word for word in words)
    ended = cli("run", SHARD, *words)
    assert ended.returncode == code, ended.stderr
    assert complaint in ended.stderr


def test_a_server_that_may_use_the_gpu_is_named_and_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "llama-server"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    trap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for is_there in (False, True):
        monkeypatch.setattr("moepack.host.gpus.has_gpu", lambda is_there=is_there: is_there)
        assert find_server(None) is None
        note = f"--server llama-server, which is {trap}, may"
        assert (note in capsys.readouterr().err) == is_there
    assert find_server("llama-server") == trap
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", ["nvidia0", "kfd", "dri/renderD128", None])
def test_a_gpu_is_seen_by_the_file_of_its_driver(tmp_path: Path, name: str | None) -> None:
    for other in ("dri/card0", "nvidiactl", name or "null"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).touch()
    assert has_gpu(tmp_path) == (name is not None)
