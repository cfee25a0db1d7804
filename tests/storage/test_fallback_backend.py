"""A backend that is refused reads later: the page cache serves, none is lost."""

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from moepack.storage.backend import ReadRequest
from moepack.storage.probe import choose, problem_with_direct_reads
from moepack.storage.threaded import ThreadedBackend
from tests.support.interruptions import before_each
from tests.support.reads import DATA

BLOCK, COUNT, DEPTH = 4096, 24, 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(DATA[: COUNT * BLOCK])
    if (problem := problem_with_direct_reads(path)) is not None:
        pytest.skip(problem)
    return path


def request(path: Path, number: int) -> ReadRequest:
    return ReadRequest(path, number * BLOCK, memoryview(bytearray(BLOCK)))


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, *offsets: int) -> list[int]:
    """Refuse direct reads at these offsets; return a list of all direct reads, as they come."""
    begun: list[int] = []

    def look(_: str, descriptor: int, buffers: Any, offset: int, *flags: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            begun.append(offset)
            if offset in offsets:
                raise OSError(code, os.strerror(code))

    before_each(monkeypatch, look, (os, "preadv"))
    return begun


@pytest.fixture
def backend() -> Iterator[ThreadedBackend]:
    with closing(ThreadedBackend(direct=True, falls_back=True)) as backend:
        yield backend


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_refused_reads_are_done_again_and_said_once(
    path: Path, backend: ThreadedBackend, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = refuse(monkeypatch, code, 9 * BLOCK, 11 * BLOCK)
    requests = {number: request(path, number) for number in range(COUNT)}
    ended: list[int] = []
    with warnings.catch_warnings(record=True) as told, closing(backend.queue(DEPTH)) as queue:
        for start in range(0, COUNT, DEPTH):
            queue.start([(number, requests[number]) for number in range(start, start + DEPTH)])
            while len(ended) < start + DEPTH:
                for completion in queue.finished(wait=True):
                    assert (completion.length, completion.error) == (BLOCK, None)
                    ended.append(completion.number)
        assert backend.read(requests[0]).error is None
    (warning,) = told
    assert f"the backend direct was refused a read ({os.strerror(code)})" in str(warning.message)
    assert sorted(ended) == list(range(COUNT))
    assert b"".join(requests[number].buffer for number in range(COUNT)) == path.read_bytes()
    assert len(begun) <= 12, "later ones are not tried"
    assert backend.name == "buffered"


def test_the_warning_is_the_caller_s_where_it_is_an_error(
    path: Path, backend: ThreadedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one of the threads that read: that would end, and its read never."""
    refuse(monkeypatch, errno.EINVAL, 0)
    with warnings.catch_warnings(), closing(backend.queue(1)) as queue:
        warnings.simplefilter("error")
        queue.start([(1, request(path, 0))])
        with pytest.raises(RuntimeWarning, match="was refused a read"):
            queue.finished(wait=True)
        queue.start([(2, request(path, 0))])
        assert queue.finished(wait=True) == [(2, BLOCK, None)]


def test_errors_that_any_backend_would_have_stay(
    path: Path, backend: ThreadedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.EIO, 0)
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (backend.read(request(path, 0)).error or OSError()).errno == errno.EIO
        assert (backend.read(request(fifo, 0)).error or OSError()).errno == errno.EINVAL
    assert backend.name == "direct"


def test_only_the_choice_of_auto_falls_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, chosen = (choose(name, [path])[0] for name in ("direct", "auto"))
    refuse(monkeypatch, errno.EINVAL, BLOCK)
    with closing(named), closing(chosen):
        assert (named.read(request(path, 1)).error or OSError()).errno == errno.EINVAL
        with pytest.warns(RuntimeWarning, match="was refused a read"):
            assert chosen.read(request(path, 1)).error is None
