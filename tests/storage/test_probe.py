"""Which backend is chosen, and why: on real file systems, under real limits and filters."""

import itertools
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.common.errors import MachineError, MoepackError
from moepack.storage.backend import Completion, ReadRequest
from moepack.storage.open_files import lies_in_memory, open_direct
from moepack.storage.probe import choose
from moepack.storage.threaded import ThreadedBackend
from tests.support.file_systems import mounted
from tests.support.seccomp import OPENAT, forbid_direct

if sys.platform != "linux":
    pytest.skip("seccomp and mounts are Linux's", allow_module_level=True)

from tests.support.reads import ALIGNED_DATA, ARENA, DATA, in_child, nothing_left

BACKENDS = ("direct", "buffered")


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Return a data file where temporary files are, if direct reads work there."""
    path = tmp_path / "data.bin"
    path.write_bytes(DATA[:10_000])
    try:
        os.close(open_direct(path).descriptor)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
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
        backend, why = choose(name, [path.parent / "none", path])
        completion = backend.read(ReadRequest(path, 1, ARENA[:100]))
        assert completion == (0, 100, None)
        assert ARENA[:100] == path.read_bytes()[1:101]
        backend.close()
    return backend.name, why


def refused(name: str, path: Path) -> MachineError:
    """Ask for a backend that does not work; give the error."""
    with nothing_left(), pytest.raises(MachineError) as caught:
        choose(name, [path])
    error = caught.value
    assert f"the backend {name} does not work here" in error.problem
    assert error.path == str(path)
    assert error.hint
    return error


def test_a_disk_is_read_past_the_page_cache(on_disk: Path) -> None:
    assert chosen("auto", on_disk) == ("direct", "direct reads data.bin")


def test_memory_is_read_plainly(in_memory: Path) -> None:
    name, why = chosen("auto", in_memory)
    assert (name, why) == ("buffered", "the files lie in memory")


@pytest.mark.skipif(platform.machine() not in OPENAT, reason="the number of openat is not known")
def test_where_opening_directly_is_refused_reads_are_plain(on_disk: Path) -> None:
    def work() -> None:
        forbid_direct()
        name, why = chosen("auto", on_disk)
        assert name == "buffered"
        assert "direct does not work here" in why
        assert "refuses O_DIRECT" in (refused("direct", on_disk).hint or "")
        assert chosen("buffered", on_disk)[0] == "buffered"

    in_child(work)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ramfs", "", "buffered"),
        ("ext4", "loop", "direct"),
        ("ext4", "loop,data=journal", "buffered"),
        ("xfs", "loop", "direct"),
        ("btrfs", "loop", "direct"),
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
            assert "direct does not work here" in why
            assert "refuses O_DIRECT" in (refused("direct", path).hint or "")


def test_a_backend_that_reads_other_bytes_is_not_chosen(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It flips a bit of what it was given to fill."""
    read = ThreadedBackend.read

    def flipping(backend: ThreadedBackend, request: ReadRequest) -> Completion:
        completion = read(backend, request)
        request.buffer[77] ^= 1
        return completion

    with monkeypatch.context() as patch:
        patch.setattr(ThreadedBackend, "read", flipping)
        backend, why = choose("auto", [on_disk])
        assert "`auto`" in (refused("direct", on_disk).hint or "")
    assert (backend.name, why) == (
        "buffered",
        "direct does not work here (it reads other bytes than a plain read)",
    )
    backend.close()


def test_who_asks_for_a_backend_gets_it_for_short_files_as_well(on_disk: Path) -> None:
    for length, name in itertools.product((101, 511, 4095, 4097), BACKENDS):
        on_disk.write_bytes(DATA[:length])
        assert chosen(name, on_disk) == (name, f"asked for; {name} reads data.bin")


@pytest.mark.parametrize("name", ["auto", "direct", "buffered"])
def test_without_a_data_file_there_is_nothing_to_try(tmp_path: Path, name: str) -> None:
    for paths in ([], [tmp_path / "none", tmp_path / "neither"]):
        with nothing_left():
            backend, why = choose(name, paths)
            assert backend.name == ("buffered" if name == "auto" else name)
            assert "there is no data file to try" in why
            backend.close()


def test_a_file_that_may_not_be_read_is_an_error_of_who_asked(tmp_path: Path) -> None:
    """A directory stands for it: root may read everything else."""
    for name in BACKENDS:
        assert isinstance(refused(name, tmp_path), MoepackError)
