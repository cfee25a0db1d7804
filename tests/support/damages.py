"""What becomes of a file on a drive, with its mtime as it was: no stamp tells of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.models import flip

Damage = Callable[[Path], None]


@contextmanager
def mtime_kept(path: Path) -> Iterator[None]:
    """Give a file, if it is there after the block, the mtime that it had before."""
    before = path.stat()
    yield
    if path.exists():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_a_byte(path: Path) -> None:
    """Change the first byte: of the first part."""
    with mtime_kept(path):
        flip(path, 0)


def change_padding(path: Path) -> None:
    """Change the last byte, which is padding."""
    assert path.read_bytes()[-1] == 0
    with mtime_kept(path):
        flip(path, path.stat().st_size - 1)


def change_padding_between_parts(path: Path) -> None:
    """Change a zero that is followed by another part."""
    data = path.read_bytes()
    at = data.index(bytes(64)) + 32
    assert any(data[at:])
    with mtime_kept(path):
        flip(path, at)


def cut(path: Path) -> None:
    """Cut a file in its middle."""
    with mtime_kept(path):
        os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    """Add a page to a file."""
    with mtime_kept(path):
        os.truncate(path, path.stat().st_size + 4096)


DAMAGES = (change_a_byte, change_padding, cut, lengthen, Path.unlink)
