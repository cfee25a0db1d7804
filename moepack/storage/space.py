"""Free space of the file system that something is going to be written to."""

import os
from pathlib import Path

from moepack.common.errors import MachineError
from moepack.common.sizes import exact_size_text, size_text


def free_space(path: Path) -> int:
    """Return the free bytes of the file system that `path` is or will be on."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def check_space(path: Path, length: int) -> None:
    """Raise MachineError if fewer than `length` bytes are free for `path`."""
    if (error := shortage(path, length)) is not None:
        raise error


def shortage(path: Path, length: int) -> MachineError | None:
    """Return the error if fewer than `length` bytes are free for `path`; None if they suffice."""
    free = free_space(path)
    if free >= length:
        return None
    text = size_text if size_text(length) != size_text(free) else exact_size_text
    expected, actual = text(length), f"{text(free)} free"
    hint = "free some space or choose another file system"
    return MachineError("not enough space", path=path, expected=expected, found=actual, hint=hint)
