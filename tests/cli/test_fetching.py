"""Models that are elsewhere, run and served by their addresses."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import moepack
from tests.support.children import MOEPACK, PATIENCE, Piped, wait_until
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.needs import needs_llama
from tests.support.remote_servers import FakeHub
from tests.support.servers import served
from tests.support.warm_command import Run

pytestmark = [needs_llama, pytest.mark.long]

ADDRESS = f"hf://{REPOSITORY}/Q4_K_M"
SMALL = ("--context", "256", "--threads", "1", "--temperature", "0")


@pytest.fixture
def hub(chat_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    model = shutil.copy(chat_path, tmp_path / "chat-Q4_K_M.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_of(tmp_path / "hub", monkeypatch, [model]) as server:
        yield server


def test_a_model_of_the_hub_answers_as_the_same_file_here(
    hub: FakeHub, chat_path: Path, cli: Run
) -> None:
    asked = ("-p", "Why is the sky blue?", "-n", "7", *SMALL)
    expected = cli("run", chat_path, *asked, "-q").stdout
    first = cli("run", ADDRESS, *asked, env=os.environ)
    assert (first.returncode, first.stdout) == (0, expected), first.stderr
    announced = first.stderr.splitlines()[0]
    assert announced.startswith(f"hf://{REPOSITORY}@{hub.commit}/chat-Q4_K_M.gguf: ")
    assert announced.endswith("chat-Q4_K_M.moepack, once")
    second = cli("run", ADDRESS, *asked, env=os.environ)
    assert second.stdout == expected
    assert "once" not in second.stderr
    answer = json.loads(cli("run", ADDRESS, *asked, "--json", env=os.environ).stdout)
    assert f"{answer['text']}\n" == expected
    hub.close()
    alone = cli("run", ADDRESS, *asked, env=os.environ)
    assert alone.stdout == expected
    notes = [line for line in alone.stderr.splitlines() if line.startswith("note: ")]
    assert sum("the model is used as it is in" in note for note in notes) == 1
    quiet = cli("run", ADDRESS, *asked, "-q", env=os.environ)
    assert (quiet.stdout, quiet.stderr) == (expected, "")


@pytest.mark.parametrize(
    "words",
    [
        (f"{REPOSITORY}:Q4_K_M",),
        (f"https://huggingface.co/{REPOSITORY}",),
        ("-hf", REPOSITORY),
    ],
)
def test_names_of_the_hub_are_run(hub: FakeHub, cli: Run, words: tuple[str, ...]) -> None:
    end = cli("run", *words, "-q", "--", "head", "-c", "4", "{}", env=os.environ)
    assert (end.returncode, end.stdout) == (0, "GGUF"), end.stderr


def test_a_path_that_is_here_is_no_name_of_the_hub(
    hub: FakeHub, chat_path: Path, tmp_path: Path, cli: Run
) -> None:
    (tmp_path / "here" / "someone").mkdir(parents=True)
    shutil.copy(chat_path, tmp_path / "here" / "someone" / "A-model")
    before = len(hub.traffic.requests)
    cli("inspect", "someone/A-model", cwd=tmp_path / "here", env=os.environ)
    assert len(hub.traffic.requests) == before


def test_an_interruption_is_gone_on_with(hub: FakeHub, tmp_path: Path, cli: Run) -> None:
    hub.content.delay = 0.5
    process = Piped(*MOEPACK, "run", ADDRESS, "-p", "x", "-n", "1")
    models = tmp_path / "cache" / "moepack" / "models"
    wait_until(lambda: list(models.rglob("pack.journal")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "hint: run the same command again: it goes on from what is there" in errors
    hub.content.delay = 0.0
    end = cli("run", ADDRESS, "-p", "x", "-n", "1", *SMALL, env=os.environ)
    assert end.returncode == 0, end.stderr


def test_it_is_served_by_its_address(hub: FakeHub) -> None:
    with served(ADDRESS, "-c", "256") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "Q4_K_M"
        process.terminate()
        assert "come to" in process.communicate(timeout=PATIENCE)[1]


# A part of a pack


@pytest.fixture
def part(address: str, tmp_path: Path) -> Path:
    """Pull half of the experts of a pack in a store."""
    moepack.pull(address, tmp_path / "part", hottest="600kB")
    return tmp_path / "part"


def test_a_part_of_a_pack_is_not_run_and_the_hint_brings_the_rest(part: Path, cli: Run) -> None:
    asked = ("-p", "Hello", "-n", "7", "--memory", "floor", *SMALL)
    end = cli("run", part, *asked, env=os.environ)
    assert end.returncode == 2
    assert "a part of the pack is not here" in end.stderr
    (hint,) = (line for line in end.stderr.splitlines() if line.startswith("hint: "))
    _, _, command = hint.partition("moepack ")
    assert cli(*shlex.split(command.rstrip("`")), env=os.environ).returncode == 0, hint
    assert cli("run", part, *asked, "-q", env=os.environ).returncode == 0
