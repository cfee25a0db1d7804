"""A folder for thousands of small files, which disks take long for."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_LENGTH = 256 << 20
"""More than all tests at a time put there: containers have 64 MiB, which may be too little."""


@pytest.fixture
def light_folder(tmp_path: Path) -> Iterator[Path]:
    """Make an empty folder, in memory where there is much of it."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _LENGTH:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
