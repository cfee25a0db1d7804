"""The control groups of this process (cgroups(7)), of both versions."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def read_number(path: Path, field: str | None = None) -> int | None:
    """Return the number in a file, or behind a field; None for others (`max`), or no file."""
    try:
        words = path.read_text().split()
        return int(words[0 if field is None else words.index(field) + 1])
    except (OSError, ValueError, IndexError):
        return None


def own_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the groups by which a controller (`memory`, `cpu`) limits this process, inner first.

    Each is its folder, and whether it is of the second version.
    """
    try:
        lines = os.fsdecode(OWN_GROUPS.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (first and second) or (controllers and controller not in controllers.split(",")):
            continue
        top = ROOT / controller if controllers else ROOT
        folder = top / path.lstrip("/")
        yield folder, not controllers
        while folder not in (top, folder.parent):
            folder = folder.parent
            yield folder, not controllers
