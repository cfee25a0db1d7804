"""The control groups that this process is in (cgroups(7)), of both versions."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class Group(NamedTuple):
    """The folder of a group, which is of the first or the second version."""

    folder: Path
    is_second: bool


def own_groups(controller: str, groups: Path = OWN_GROUPS, root: Path = ROOT) -> Iterator[Group]:
    """Yield the groups by which a controller (`memory`, `cpu`) limits this process, inner first."""
    try:
        lines = os.fsdecode(groups.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (first and second) or (controllers and controller not in controllers.split(",")):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        while True:
            yield Group(folder, is_second=not controllers)
            if folder in (top, folder.parent):
                break
            folder = folder.parent
