"""Who else has a file open or mapped, whatever files are called."""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepack.storage.sharing import holders

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
