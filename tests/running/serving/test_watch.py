"""What a server tells of itself: requests that have ended, and its file for `moepack ps`."""

import contextlib
import fcntl
from pathlib import Path

import pytest

from moepack.running.serving.running_servers import ServerFile, read_servers
from moepack.running.serving.server_log import RequestFacts
from moepack.running.serving.watch import Watch


def test_a_mistake_of_ours_is_no_client_that_has_left() -> None:
    log: list[RequestFacts] = []
    watch = Watch(log.append)
    for error in (KeyError("of ours"), ConnectionResetError("of the client")):
        with contextlib.suppress(type(error)), watch.exchange() as exchange:
            exchange.begin(b"GET", b"/")
            raise error
    assert [(facts.status, facts.has_left) for facts in log] == [(500, False), (None, True)]


def test_where_nothing_can_be_locked_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def fail(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with ServerFile() as file:
        file.write({"began": 1})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert read_servers() == []
