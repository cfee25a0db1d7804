"""A backend that was chosen and is refused reads later: the page cache serves, none is lost."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from moepack.storage.backend import ReadRequest
from moepack.storage.probe import choose, problem_with
from moepack.storage.routed_backend import FallbackBackend
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.reads import DATA

BLOCK, COUNT, DEPTH = 4096, 24, 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(DATA[: COUNT * BLOCK])
    return path


def require(name: str, path: Path) -> None:
    """Skip a test where a backend does not work."""
    if (problem := problem_with(name, path, DEPTH)) is not None:
        pytest.skip(problem[0])


def request(path: Path, number: int) -> ReadRequest:
    return ReadRequest(path, number * BLOCK, memoryview(bytearray(BLOCK)))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("name", ["direct", "uring"])
def test_refused_reads_are_done_again_and_said_once(path: Path, name: str, code: int) -> None:
    require(name, path)
    faults = (Fault(code=code, offset=number * BLOCK) for number in (9, 11))
    faulty = FaultyBackend(make(name), *faults)
    backend = FallbackBackend(faulty)
    queue = backend.queue(DEPTH)
    assert queue.fileno() >= 0
    requests = {number: request(path, number) for number in range(COUNT)}
    ended: list[int] = []
    with warnings.catch_warnings(record=True) as told:
        for start in range(0, COUNT, DEPTH):
            queue.start([(number, requests[number]) for number in range(start, start + DEPTH)])
            while len(ended) < start + DEPTH:
                for completion in queue.finished(wait=True):
                    assert (completion.length, completion.error) == (BLOCK, None)
                    ended.append(completion.number)
        assert backend.read(requests[0]).error is None
    queue.close()
    backend.close()
    (warning,) = told
    assert f"the backend {name} was refused a read ({os.strerror(code)})" in str(warning.message)
    assert sorted(ended) == list(range(COUNT))
    assert b"".join(requests[number].buffer for number in range(COUNT)) == path.read_bytes()
    assert len(faulty.begun) <= 12, "later ones are not tried"
    assert backend.name == "buffered"


def test_errors_that_any_backend_would_have_stay(path: Path) -> None:
    backend = FallbackBackend(FaultyBackend(make("direct"), Fault(code=errno.EIO, path=path)))
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (backend.read(request(path, 0)).error or OSError()).errno == errno.EIO
        assert (backend.read(request(fifo, 0)).error or OSError()).errno == errno.EINVAL
    assert backend.name == "direct"
    backend.close()


def test_only_the_choice_of_auto_falls_back(path: Path) -> None:
    for name in ("direct", "uring"):
        require(name, path)
        assert not isinstance(choose(name, [path], DEPTH)[0], FallbackBackend)
    assert isinstance(choose("auto", [path], DEPTH)[0], FallbackBackend)
