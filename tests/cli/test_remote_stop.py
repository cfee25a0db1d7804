"""The ends of commands that read from a store: at Ctrl-C, TERM, and refusals midway."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moepack
from moepack.cli import main
from tests.support.children import MOEPACK, PATIENCE, Piped, run_command, wait_until
from tests.support.models import shards_of
from tests.support.pulls import store_of_packs
from tests.support.remote_servers import FileServer
from tests.support.warm_command import Run

pytestmark = pytest.mark.long

AT_ONCE = 8.0
"""Seconds that a busy machine takes at most; the server says nothing for 60, and is left at 30."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote") / "store"
    folder.mkdir()
    for shard in shards_of("granite"):
        shutil.copy(shard, folder)
    moepack.pack_model(folder, folder / "pack")
    return folder


@pytest.fixture
def server(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with store_of_packs(store, monkeypatch) as one:
        yield one


def test_a_command_that_has_read_from_a_store_ends_at_once_when_all_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[str] = []
    monkeypatch.setitem(sys.modules, "obstore", sys)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: ends.append("closed"))
    monkeypatch.setattr("os._exit", lambda code: ends.append(f"{code}, {capsys.readouterr().out}"))
    print("written")
    with pytest.raises(SystemExit):  # which os._exit does not let happen
        main._leave(7)
    assert ends == ["closed", "7, written\n"]


@pytest.mark.slow
def test_the_threads_of_a_client_abort_no_command_that_is_done(server: FileServer) -> None:
    """Without `_leave` one of twenty or so is aborted, on a busy machine."""
    words = [*MOEPACK, "inspect", f"{server.url}/{Path(shards_of('granite')[0]).name}"]
    with ThreadPoolExecutor(5) as pool:
        runs = list(pool.map(lambda _: run_command(*words), range(40)))
    assert {run.returncode for run in runs} == {0}


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("pull {url}/pack -o {new}", signal.SIGINT),
        ("pack {url}/{shard} -o {new}", signal.SIGTERM),
        ("inspect {url}/{shard}", signal.SIGINT),
    ],
)
def test_a_signal_ends_it_while_the_server_says_nothing(
    line: str, sent: signal.Signals, server: FileServer, tmp_path: Path, cli: Run
) -> None:
    names = {"url": server.url, "shard": Path(shards_of("granite")[0]).name}
    words = [word.format(**names, new=tmp_path / "new") for word in line.split()]
    whole = cli(*words)
    assert whole.returncode == 0, whole.stderr
    count = len(server.traffic.gets())
    last = count + count // 2
    if (tmp_path / "new").is_dir():
        shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").unlink(missing_ok=True)
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    server.fault = lambda number: "stall" if number >= last else None
    process = Piped(*MOEPACK, *words)
    wait_until(lambda: len(server.traffic.gets()) > last)
    time.sleep(0.2)
    started = time.monotonic()
    process.send_signal(sent)
    _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - started < AT_ONCE
    # Python ends by the signal itself if that came while a late import made a dataclass.
    assert process.returncode in (130, -signal.SIGINT)
    assert "error: interrupted" in errors


@pytest.mark.parametrize(
    ("line", "advice"),
    [("pack {url}/{shard} -o {new}", "--resume"), ("pull {url}/pack -o {new}", "goes on from")],
)
def test_a_refusal_midway_says_that_a_link_has_expired_and_how_to_go_on(
    line: str, advice: str, server: FileServer, tmp_path: Path, cli: Run
) -> None:
    names = {"url": server.url, "shard": Path(shards_of("granite")[0]).name}
    words = [word.format(**names, new=tmp_path / "new") for word in line.split()]
    whole = cli(*words)
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(tmp_path / "new")
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    last = 2 * len(server.traffic.gets()) - 1
    server.fault, server.status = lambda number: "status" if number == last else None, 403
    end = cli(*words, "--threads", "1")
    assert end.returncode == 6, end.stderr
    assert "403 Forbidden" in end.stderr
    assert "the link or the credentials may have expired" in end.stderr
    assert advice in end.stderr
