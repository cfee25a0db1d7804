"""Who else has a file open or mapped, whatever files are called, and whenever they open it."""

import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepack.storage.blocks import holders, is_open_elsewhere
from tests.support.reads import in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read from /proc")

Map = Callable[[Path], None]
_LENGTH = mmap.PAGESIZE


@pytest.fixture
def map_file() -> Iterator[Map]:
    """Map files into this process, as programs do that close them then."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    mapped: list[int] = []

    def add(path: Path) -> None:
        path.write_bytes(bytes(_LENGTH))
        with open(path, "rb") as file:
            at = libc.mmap(None, _LENGTH, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        assert at not in (None, ctypes.c_void_p(-1).value)
        mapped.append(at)

    yield add
    for at in mapped:
        libc.munmap(at, _LENGTH)


def test_a_mapped_file_has_a_holder_whatever_its_name(tmp_path: Path, map_file: Map) -> None:
    for name in ("plain", "two words", "a\nb", "not UTF-8 \udcff"):
        free = tmp_path / f"free {name}"
        free.touch()
        map_file(tmp_path / name)
        assert any(f"({os.getpid()})" in holder for holder in holders(tmp_path / name)), ascii(name)
        assert not list(holders(free))


def test_who_opens_the_file_while_it_is_looked_at_ends_nothing(tmp_path: Path) -> None:
    """The system sends the holder of a lease a signal then, which by default ends the process."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    real = fcntl.fcntl

    def fcntl_and_open(descriptor: int, command: int, argument: int = 0) -> int:
        result = real(descriptor, command, argument)
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            with pytest.raises(BlockingIOError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return result

    def work() -> None:
        fcntl.fcntl = fcntl_and_open  # type: ignore[assignment]
        assert not is_open_elsewhere(path)

    in_child(work)
