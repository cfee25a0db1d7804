"""How much memory there is: what the system has, and what control groups leave of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from moepack.machine.control_groups import OWN_GROUPS, ROOT, own_groups
from moepack.machine.model import Figure
from moepack.sizes import Size, is_share, parse_size

_MIB = 1 << 20
_LEAST_MARGIN = 512 * _MIB
PRESSURE = Path("/proc/pressure/memory")
MOST_STALLED = 10.0
"""Percent of the last ten seconds in which something may wait for memory, before it is short."""


def available_memory() -> int:
    """Return the bytes that this process may still take, less a margin for all else.

    Of what the system has available and what each limit of its control groups leaves, the least;
    the margin is a tenth, at least 512 MiB. The sources: proc(5), cgroups(7).
    """
    return max(0, spare_memory())


def spare_memory() -> int:
    """Return what `available_memory` does; where the margin is touched, what lacks, below 0."""
    lefts = [left for group in _groups() if (left := _left(*group)) is not None]
    least = min([_system_field("MemAvailable"), *lefts])
    return least - max(_LEAST_MARGIN, least // 10)


def read_memory() -> Figure:
    """Return the bytes that all programs together may take, in whole MiB.

    Of what the system has and each limit of this process's control groups, the least.
    """
    limit = limited_memory()
    least = system_memory() if limit is None else min(system_memory(), limit)
    return Figure(least - least % _MIB, "read")


def memory_length(memory: Size | None) -> int | Literal["floor"] | None:
    """Return the bytes of a memory limit: `50%` is of what `read_memory` says.

    `floor` and None are left to who knows the model. Raises RequestError for what is no size.
    """
    if memory is None or memory == "floor":
        return None if memory is None else "floor"
    whole = int(read_memory().value) if is_share(memory) else None
    return parse_size(memory, "memory", whole=whole)


def system_memory() -> int:
    """Return the bytes of memory that the system has."""
    return _system_field("MemTotal")


def limited_memory() -> int | None:
    """Return the least limit in bytes of this process's control groups, None without any."""
    limits = [most for limit, _ in _groups() if (most := _limit(limit)) is not None]
    return min(limits, default=None)


def stalled_percent(path: Path = PRESSURE) -> float | None:
    """Return in what part of the last ten seconds something waited for memory, in percent.

    None where the system does not tell (PSI, `some avg10`; psi of the kernel's documentation).
    """
    try:
        return float(path.read_text().split()[1].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):
        return None


def _system_field(field: str) -> int:
    """Return a field of /proc/meminfo in bytes; all of the memory where that is not known."""
    try:
        fields = Path("/proc/meminfo").read_text().split()
        return int(fields[fields.index(f"{field}:") + 1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> Iterator[tuple[Path, Path]]:
    """Yield the files of limit and usage of each of this process's groups, of both versions."""
    for folder, is_second in own_groups("memory", OWN_GROUPS, ROOT):
        limit, usage = ("max", "current") if is_second else ("limit_in_bytes", "usage_in_bytes")
        yield folder / f"memory.{limit}", folder / f"memory.{usage}"


def _left(limit: Path, usage: Path) -> int | None:
    """Return what a group has left; what it has in the page cache can go, and is not counted."""
    most = _limit(limit)
    if most is None:
        return None
    try:
        return max(0, most - int(usage.read_text()) + _cached(usage.parent))
    except (OSError, ValueError):
        return None


def _limit(limit: Path) -> int | None:
    """Return what a group may take; None where it has no limit, or the file says nothing."""
    try:
        return int(limit.read_text())
    except (OSError, ValueError):  # `max`, where there is none
        return None


def _cached(group: Path) -> int:
    """Return the bytes of files that a group has read and does not use."""
    try:
        stat = (group / "memory.stat").read_text().split()
        return int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):
        return 0
