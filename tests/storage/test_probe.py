"""Which backend is chosen, and why: on real file systems, under real limits and filters."""

import errno
import itertools
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MachineError, MoepackError
from moepack.storage.backend import Completion, ReadRequest
from moepack.storage.open_files import lies_in_memory, open_direct
from moepack.storage.probe import choose
from moepack.storage.threaded import ThreadedQueue
from tests.support.file_systems import mounted
from tests.support.interruptions import before_each
from tests.support.seccomp import IO_URING_SETUP, OPENAT, forbid, forbid_direct

if sys.platform != "linux":
    pytest.skip("seccomp, mounts and io_uring are Linux's", allow_module_level=True)

from moepack.storage.io_uring import UringQueue
from moepack.storage.ring import Ring
from tests.support.reads import ALIGNED_DATA, ARENA, DATA, in_child, nothing_left

DEPTH = 4
BACKENDS = ("uring", "direct", "buffered")


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Return a data file where temporary files are, if direct reads work there."""
    path = tmp_path / "data.bin"
    path.write_bytes(DATA[:10_000])
    try:
        os.close(open_direct(path).descriptor)
        Ring(1).close()
    except OSError as error:
        pytest.skip(f"neither io_uring nor O_DIRECT here: {error}")
    if lies_in_memory(path):
        pytest.skip("temporary files are in memory here")
    return path


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Return a data file on tmpfs."""
    path = Path(f"/dev/shm/moepack-test-{os.getpid()}")
    try:
        path.write_bytes(DATA[:10_000])
    except OSError:
        pytest.skip("there is no /dev/shm")
    yield path
    path.unlink()


def chosen(name: str, path: Path) -> tuple[str, str]:
    """Choose by the first file that is there, read with the backend, and close it."""
    with nothing_left():
        backend, why = choose(name, [path.parent / "none", path], DEPTH)
        completion = backend.read(ReadRequest(path, 1, ARENA[:100]))
        assert completion == (0, 100, None)
        assert ARENA[:100] == path.read_bytes()[1:101]
        backend.close()
    return backend.name, why


def refused(name: str, path: Path) -> MachineError:
    """Ask for a backend that does not work; give the error."""
    with nothing_left(), pytest.raises(MachineError) as caught:
        choose(name, [path], DEPTH)
    error = caught.value
    assert f"the backend {name} does not work here" in error.problem
    assert error.path == str(path)
    assert error.hint
    return error


def test_a_disk_is_read_through_a_ring(on_disk: Path) -> None:
    assert chosen("auto", on_disk) == ("uring", "uring reads data.bin right")


def test_memory_is_read_plainly(in_memory: Path) -> None:
    name, why = chosen("auto", in_memory)
    assert (name, why) == ("buffered", "the files lie in memory")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_io_uring_is_forbidden_direct_reads_are_taken(on_disk: Path, code: int) -> None:
    def work() -> None:
        forbid(IO_URING_SETUP, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            Ring(1)
        name, why = chosen("auto", on_disk)
        assert name == "direct"
        assert f"uring does not work here ({os.strerror(code)})" in why
        assert "direct reads data.bin right" in why
        error = refused("uring", on_disk)
        assert "`direct`" in (error.hint or "")
        assert ("seccomp" in (error.hint or "")) == (code == errno.EPERM)
        assert chosen("direct", on_disk)[0] == "direct"

    in_child(work)


@pytest.mark.skipif(platform.machine() not in OPENAT, reason="the number of openat is not known")
def test_where_opening_directly_is_refused_reads_are_plain(on_disk: Path) -> None:
    def work() -> None:
        forbid_direct()
        name, why = chosen("auto", on_disk)
        assert name == "buffered"
        assert "uring does not work here" in why
        assert "direct does not work here" in why
        for one in ("uring", "direct"):
            assert "refuses O_DIRECT" in (refused(one, on_disk).hint or "")
        assert chosen("buffered", on_disk)[0] == "buffered"

    in_child(work)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ramfs", "", "buffered"),
        ("ext4", "loop", "uring"),
        ("ext4", "loop,data=journal", "buffered"),
        ("xfs", "loop", "uring"),
        ("btrfs", "loop", "uring"),
    ],
)
def test_each_file_system_is_read_as_it_allows(
    tmp_path: Path, kind: str, options: str, expected: str
) -> None:
    """Real ones, mounted where only a process of the test sees them."""
    with mounted(kind, tmp_path / "place", options=options) as root:
        path = root / "data.bin"
        path.write_bytes(ALIGNED_DATA + b"ragged")
        os.sync()
        name, why = chosen("auto", path)
        assert name == expected, why
        if kind == "ramfs":
            assert why == "the files lie in memory"
        elif expected == "buffered":
            assert "uring does not work here" in why
            for one in ("uring", "direct"):
                assert "refuses O_DIRECT" in (refused(one, path).hint or "")


@pytest.mark.parametrize("both", [False, True])
def test_a_backend_that_reads_other_bytes_is_not_chosen(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    """Its queue flips a bit of what it was given to fill."""

    def spoil(kind: type[UringQueue] | type[ThreadedQueue]) -> None:
        buffers: list[memoryview] = []
        finished = kind.finished

        def note(_: str, queue: Any, requests: list[tuple[int, ReadRequest]]) -> None:
            buffers.extend(request.buffer for _, request in requests)

        def flipping(queue: Any, *, wait: bool) -> list[Completion]:
            completions = finished(queue, wait=wait)
            buffers.pop()[77] ^= 1
            return completions

        before_each(monkeypatch, note, (kind, "start"))
        monkeypatch.setattr(kind, "finished", flipping)

    spoil(UringQueue)
    if both:
        spoil(ThreadedQueue)
    name, why = chosen("auto", on_disk)
    assert name == ("buffered" if both else "direct")
    assert "uring does not work here (it reads other bytes than a plain read)" in why
    assert why.count("it reads other bytes") == 1 + both
    assert "`auto`" in (refused("uring", on_disk).hint or "")


def test_who_asks_for_a_backend_gets_it_for_short_files_as_well(on_disk: Path) -> None:
    for length, name in itertools.product((101, 511, 4095, 4097), BACKENDS):
        on_disk.write_bytes(DATA[:length])
        assert chosen(name, on_disk) == (name, f"asked for; {name} reads data.bin right")


@pytest.mark.parametrize("name", ["auto", "uring", "direct", "buffered"])
def test_without_a_data_file_there_is_nothing_to_try(tmp_path: Path, name: str) -> None:
    for paths in ([], [tmp_path / "none", tmp_path / "neither"]):
        with nothing_left():
            backend, why = choose(name, paths, DEPTH)
            assert backend.name == ("buffered" if name == "auto" else name)
            assert "there is no data file to try" in why
            backend.close()


def test_a_file_that_may_not_be_read_is_an_error_of_who_asked(tmp_path: Path) -> None:
    """A directory stands for it: root may read everything else."""
    for name in BACKENDS:
        assert isinstance(refused(name, tmp_path), MoepackError)
