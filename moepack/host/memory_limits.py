"""The memory that there is: the system's, and the limits of control groups."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from moepack.common.sizes import Size, is_share, parse_size, size_text
from moepack.host.control_groups import own_groups, read_number

_MIB = 1 << 20
_LEAST_MARGIN = 512 * _MIB
PRESSURE = Path("/proc/pressure/memory")
MOST_STALLED = 10.0
"""Percent of the last ten seconds in which something may wait for memory, before it is short."""
_EVENTS = ("memory.events", "memory.oom_control")
"""The files of both versions that count killed processes."""
_SYSTEM_EVENTS = Path("/proc/vmstat")
_DROPPED = {
    True: (("inactive_file", "active_file", "slab_reclaimable"), ("file_dirty", "file_writeback")),
    # Fields without `total_` leave out the groups inside one, whose pages its limit counts.
    False: (("total_inactive_file", "total_active_file"), ("total_dirty", "total_writeback")),
}
"""The fields of memory.stat that can be dropped, and those among them that cannot yet, by whether
the group is of the second version (cgroup-v2.rst and cgroup-v1/memory.rst of the kernel)."""


def available_memory() -> int:
    """Return the bytes that this process may still take, less a margin for all else.

    It is the least of the system's available memory and the rest of each limit of its control
    groups; the margin is a tenth, at least 512 MiB. The sources: proc(5), cgroups(7).
    """
    return max(0, spare_memory())


def spare_memory() -> int:
    """Return `available_memory`, or below 0 the bytes by which the margin is touched."""
    limits = [limit - usage for limit, usage in _limits() if usage is not None]
    least = min([_system_field("MemAvailable"), *(max(0, limit) for limit in limits)])
    return least - max(_LEAST_MARGIN, least // 10)


def read_memory() -> int:
    """Return the bytes that all programs together may take, in whole MiB.

    It is the least of the system's memory and the limits of this process's control groups.
    """
    limit = limited_memory()
    least = system_memory() if limit is None else min(system_memory(), limit)
    return least - least % _MIB


def memory_length(memory: Size | None) -> int | Literal["floor"] | None:
    """Return the bytes of a memory limit: `50%` is a share of `read_memory`.

    `floor` and None are left to callers, who know the model. Raises RequestError for no size.
    """
    if memory is None or memory == "floor":
        return None if memory is None else "floor"
    whole = read_memory() if is_share(memory) else None
    return parse_size(memory, "memory", whole=whole)


def own_memory(process_id: int) -> int:
    """Return the bytes of a process that are of no file (proc(5)); 0 if it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{process_id}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def system_memory() -> int:
    """Return the bytes of memory that the system has."""
    return _system_field("MemTotal")


def limited_memory() -> int | None:
    """Return the least limit in bytes of this process's control groups, None without any."""
    return min((limit for limit, _ in _limits()), default=None)


def stalled_percent(path: Path = PRESSURE) -> float | None:
    """Return the part of the last ten seconds in which something waited for memory, in percent.

    None if the system does not tell (PSI, `some avg10`; psi of the kernel's documentation).
    """
    try:
        return float(path.read_text().split()[1].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):
        return None


def limit_text() -> str:
    """Return a clause about the memory that all programs together may take, for people."""
    limit, most = limited_memory(), system_memory()
    if limit is None or limit >= most:
        return f"this machine has {size_text(most)}"
    return f"its control group allows {size_text(limit)}"


def kill_count(folders: Iterable[Path] | None = None) -> int:
    """Return how many processes of control groups were killed so far, out of memory.

    `folders` are those of groups, by default of this process's own, the inner first; the first
    that tells counts, or else the system. 0 if nothing tells.
    """
    if folders is None:
        folders = (folder for folder, _ in own_groups("memory"))
    files = [folder / name for folder in folders for name in _EVENTS]
    counts = (read_number(file, "oom_kill") for file in (*files, _SYSTEM_EVENTS))
    return next((count for count in counts if count is not None), 0)


def _system_field(field: str) -> int:
    """Return a field of /proc/meminfo in bytes; all of the memory if that is not known."""
    length = read_number(Path("/proc/meminfo"), f"{field}:")
    if length is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return length * 1024


def _limits() -> list[tuple[int, int | None]]:
    """Return the limit and usage of each of this process's groups that has a limit.

    What the system can drop at once is not counted: files in the page cache, however often they
    were read, unless they are yet to be written; None is unknown.
    """
    limits = []
    for folder, is_second in own_groups("memory"):
        names = ("max", "current") if is_second else ("limit_in_bytes", "usage_in_bytes")
        limit, usage = (read_number(folder / f"memory.{name}") for name in names)
        if limit is not None:
            dropped, busy = (
                sum(read_number(folder / "memory.stat", field) or 0 for field in fields)
                for fields in _DROPPED[is_second]
            )
            limits.append((limit, None if usage is None else usage - max(0, dropped - busy)))
    return limits
