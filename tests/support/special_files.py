"""Things that have names as files do, and are none: FIFOs, sockets, devices."""

import os
import stat
from pathlib import Path

import pytest

_KINDS = {
    "a FIFO": (stat.S_IFIFO, 0),
    "a socket": (stat.S_IFSOCK, 0),
    # What /dev/null is (null(4)), under a name that nobody else uses.
    "a device": (stat.S_IFCHR, os.makedev(1, 3)),
    # In the range for local use (Linux's devices.txt): nothing answers there.
    "a drive": (stat.S_IFBLK, os.makedev(240, 250)),
}
SPECIAL = tuple(_KINDS)


def make_special(kind: str, path: Path) -> None:
    """Make one at `path`; skip the test where this user may not."""
    mode, device = _KINDS[kind]
    try:
        os.mknod(path, mode | 0o600, device)
    except PermissionError:
        pytest.skip("only root may make devices")


def is_special(kind: str, path: Path) -> bool:
    """Return whether what was made at `path` is there."""
    status = os.lstat(path)
    return (stat.S_IFMT(status.st_mode), status.st_rdev) == _KINDS[kind]
