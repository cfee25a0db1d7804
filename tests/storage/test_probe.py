"""Which backend is chosen, and why: on real file systems, under real limits and filters."""

import contextlib
import errno
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.storage.backend import Completion, ReadRequest
from moepack.storage.open_files import lies_in_memory, open_direct
from moepack.storage.probe import choose
from moepack.storage.threaded import ThreadedQueue
from tests.support.machine_faults import Room
from tests.support.seccomp import IO_URING_SETUP, OPENAT, forbid, forbid_direct

if sys.platform != "linux":
    pytest.skip("seccomp, mounts and io_uring are Linux's", allow_module_level=True)

from moepack.storage.io_uring import UringQueue
from moepack.storage.ring import Ring
from tests.support.reads import ALIGNED_DATA, ARENA, DATA, in_child, nothing_left

DEPTH = 4


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
    """Choose, read with what was chosen, and close it; nothing may be left of it."""
    with nothing_left():
        backend, why = choose(name, [path], DEPTH)
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


@pytest.mark.parametrize("name", ["uring", "direct", "buffered"])
def test_who_asks_for_a_backend_gets_it(on_disk: Path, name: str) -> None:
    assert chosen(name, on_disk) == (name, f"asked for; {name} reads data.bin right")


def test_memory_is_read_plainly(in_memory: Path) -> None:
    name, why = chosen("auto", in_memory)
    assert (name, why) == ("buffered", "the files lie in memory")


@pytest.mark.parametrize("name", ["uring", "direct"])
def test_who_asks_for_direct_reads_of_memory_gets_them_or_an_error(
    in_memory: Path, name: str
) -> None:
    """Old kernels have no O_DIRECT on tmpfs, newer ones take anything."""
    try:
        os.close(open_direct(in_memory).descriptor)
    except OSError:
        refused(name, in_memory)
    else:
        assert chosen(name, in_memory)[0] == name


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
    ("kind", "options", "length", "expected"),
    [
        ("ramfs", [], 0, "buffered"),
        ("ext4", ["-o", "loop"], 16, "uring"),
        ("ext4", ["-o", "loop,data=journal"], 16, "buffered"),
        ("xfs", ["-o", "loop"], 320, "uring"),
        ("btrfs", ["-o", "loop"], 128, "uring"),
    ],
)
def test_each_file_system_is_read_as_it_allows(
    tmp_path: Path, kind: str, options: list[str], length: int, expected: str
) -> None:
    """Real ones, mounted where only a process of the test sees them."""
    place = tmp_path / "place"
    place.mkdir()
    image = tmp_path / "image"
    if length:
        with open(image, "wb") as file:
            file.truncate(length << 20)
        if not make_file_system(kind, image):
            pytest.skip(f"there is no mkfs.{kind}, or it cannot make so small a one")
    with Room() as room:
        what = [str(image)] if length else ["none"]
        seen = room.mount(place, "-t", kind, *options, *what)
        path = seen / "data.bin"
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


def make_file_system(kind: str, image: Path) -> bool:
    """Make a file system in a file; say whether that went well."""
    command = [f"mkfs.{kind}", "-q", str(image)]
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        return False


def test_an_unknown_name_is_a_mistake_of_the_caller(on_disk: Path) -> None:
    with nothing_left(), pytest.raises(RequestError, match="no such backend") as caught:
        choose("mmap", [on_disk], DEPTH)
    assert "auto, uring, direct, buffered" in str(caught.value)


@pytest.mark.parametrize("name", ["uring", "direct", "buffered"])
def test_too_many_open_files_is_an_error_with_a_hint(on_disk: Path, name: str) -> None:
    """Standard input's number is the only one that is free."""

    def work() -> None:
        os.close(0)
        with nothing_left():
            held = [os.open("/dev/null", os.O_RDONLY)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, 20_000))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            os.close(held.pop())
            if name == "buffered":  # this one needs no more than the file
                held.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(MachineError) as caught:
                choose(name, [on_disk], DEPTH)
            assert "ulimit -n" in (caught.value.hint or ""), str(caught.value)
            for one in held:
                os.close(one)

    in_child(work)


@pytest.mark.parametrize("both", [False, True])
def test_a_backend_that_reads_other_bytes_is_not_chosen(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    """Its queue flips a bit of what it was given to fill."""

    def spoil(kind: type[UringQueue] | type[ThreadedQueue]) -> None:
        buffers: list[memoryview] = []
        start, finished = kind.start, kind.finished

        def noting(queue: Any, requests: list[tuple[int, ReadRequest]]) -> None:
            buffers.extend(request.buffer for _, request in requests)
            start(queue, requests)

        def flipping(queue: Any, *, wait: bool) -> list[Completion]:
            found = finished(queue, wait=wait)
            buffers.pop()[77] ^= 1
            return found

        monkeypatch.setattr(kind, "start", noting)
        monkeypatch.setattr(kind, "finished", flipping)

    spoil(UringQueue)
    if both:
        spoil(ThreadedQueue)
    name, why = chosen("auto", on_disk)
    assert name == ("buffered" if both else "direct")
    assert "uring does not work here (it reads other bytes than a plain read)" in why
    assert why.count("it reads other bytes") == 1 + both
    assert "`auto`" in (refused("uring", on_disk).hint or "")


def test_a_backend_that_reads_too_little_is_not_chosen(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = UringQueue.finished

    def short(queue: UringQueue, *, wait: bool) -> list[Completion]:
        return [one._replace(length=one.length // 2) for one in real(queue, wait=wait)]

    monkeypatch.setattr(UringQueue, "finished", short)
    assert chosen("auto", on_disk)[0] == "direct"


@pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097])
def test_a_short_file_is_tried_as_well(on_disk: Path, length: int) -> None:
    on_disk.write_bytes(DATA[:length])
    for name in ("uring", "direct", "buffered"):
        with nothing_left():
            backend, why = choose(name, [on_disk], DEPTH)
            backend.close()
        assert why == f"asked for; {name} reads data.bin right"


@pytest.mark.parametrize("name", ["auto", "uring", "direct", "buffered"])
def test_without_a_data_file_there_is_nothing_to_try(tmp_path: Path, name: str) -> None:
    for paths in ([], [tmp_path / "none", tmp_path / "neither"]):
        with nothing_left():
            backend, why = choose(name, paths, DEPTH)
            assert backend.name == ("buffered" if name == "auto" else name)
            assert "there is no data file to try" in why
            backend.close()


def test_the_first_file_that_is_there_is_tried(on_disk: Path) -> None:
    with nothing_left():
        backend, why = choose("auto", [on_disk.parent / "none", on_disk], DEPTH)
        backend.close()
    assert why == "uring reads data.bin right"


def test_a_file_that_may_not_be_read_is_an_error_of_who_asked(tmp_path: Path) -> None:
    """A directory stands for it: root may read everything else."""
    for name in ("uring", "direct", "buffered"):
        assert isinstance(refused(name, tmp_path), MoepackError)


def test_a_trial_asks_for_the_depth_that_will_be_used(on_disk: Path) -> None:
    with pytest.raises(MachineError):
        choose("uring", [on_disk], 1 << 20)
    backend, _ = choose("uring", [on_disk], 100)
    assert [queue.depth for queue in backend._idle] == [100]  # type: ignore[attr-defined]
    backend.close()


def test_a_depth_that_no_ring_has_is_not_blamed_on_the_file_system(on_disk: Path) -> None:
    with pytest.raises(MachineError) as caught:
        choose("uring", [on_disk], 1 << 20)
    assert "file system" not in (caught.value.hint or "")
