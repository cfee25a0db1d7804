"""How much memory there is: what the system has, and what control groups leave of it."""

import os
from collections.abc import Iterator
from pathlib import Path

_LEAST_MARGIN = 512 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the bytes that this process may still take, less a margin for all else.

    Of what the system has available and what each limit of its control groups leaves, the least;
    the margin is a tenth, at least 512 MiB. The sources: proc(5), cgroups(7).
    """
    least = min([_system_memory(), *_left_by_limits()])
    return max(0, least - max(_LEAST_MARGIN, least // 10))


def _system_memory() -> int:
    try:
        fields = Path("/proc/meminfo").read_text().split()
        return int(fields[fields.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_by_limits() -> Iterator[int]:
    """Yield what each limit on memory leaves of this process's groups, of both versions."""
    try:
        groups = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, limit, usage = _CGROUPS / "memory", "limit_in_bytes", "usage_in_bytes"
        elif not controllers:
            root, limit, usage = _CGROUPS, "max", "current"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            left = _left(folder / f"memory.{limit}", folder / f"memory.{usage}")
            if left is not None:
                yield left
            if folder in (root, folder.parent):
                break
            folder = folder.parent


def _left(limit: Path, usage: Path) -> int | None:
    """Return what a group has left; what it has in the page cache can go, and is not counted."""
    try:
        text = limit.read_text().strip()
        if text == "max":
            return None
        return max(0, int(text) - int(usage.read_text()) + _cached(usage.parent))
    except (OSError, ValueError):
        return None


def _cached(group: Path) -> int:
    """Return the bytes of files that a group has read and does not use."""
    try:
        stat = (group / "memory.stat").read_text().split()
        return int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):
        return 0
