"""How much room is left where something is going to be written."""

import os
from pathlib import Path

from moepack.errors import MachineError
from moepack.sizes import exact_size_text


def free_space(path: Path) -> int:
    """Return the bytes that are free where `path` is or will be."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def check_space(path: Path, length: int) -> None:
    """Raise MachineError where fewer than `length` bytes are free where `path` is or will be."""
    free = free_space(path)
    if free < length:
        raise MachineError(
            "not enough space",
            path=path,
            expected=exact_size_text(length),
            found=f"{exact_size_text(free)} free",
            hint="free some space or choose another file system",
        )
