"""How many threads may compute: processors that this process may use, and how busy they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from moepack.machine.control_groups import OWN_GROUPS, ROOT, own_groups

_CPUS = Path("/sys/devices/system/cpu")
_STAT = Path("/proc/stat")
_BUSY = 0.5
"""Of a processor: what may be asked for beyond what there is."""
_LEAST_SECONDS = 0.15
_IDLE = (3, 4, 8, 9)
"""The fields of /proc/stat that are idle, waiting for drives, or counted in others (proc(5))."""


def limited_threads(cpus: Path = _CPUS, groups: Path = OWN_GROUPS, root: Path = ROOT) -> int | None:
    """Return how many threads may compute at once, None where nothing limits this process.

    Of the cores that the process may use, one thread each; no more than its control groups allow.
    llama.cpp starts as many as the machine has cores, and each of them is waited for all the time.
    """
    quota = cpu_quota(groups, root)
    if quota is not None:
        return max(1, min(core_count(cpus), int(quota)))
    return None if len(_allowed()) == os.cpu_count() else core_count(cpus)


def cpu_quota(groups: Path = OWN_GROUPS, root: Path = ROOT) -> float | None:
    """Return how many processors' time the control groups allow, None where none limits it."""
    return min(_quotas(groups, root), default=None)


def core_count(cpus: Path = _CPUS) -> int:
    """Return how many cores this process may use: two processors may be threads of one."""
    siblings = set()
    for cpu in _allowed():
        try:
            siblings.add((cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def _allowed() -> Collection[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """Yield how many processors each of this process's control groups allows."""
    for group in own_groups("cpu", groups, root):
        if (quota := _quota(group.folder, is_second=group.is_second)) is not None:
            yield quota


def _quota(folder: Path, *, is_second: bool) -> float | None:
    """Return the quota of a group, of the first or second version; None where it has none."""
    try:
        if is_second:
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(most) / int(period) if int(most) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # `max`, where there is none
        return None


def fewer_threads(threads: int | None, busy: float, cpu_count: int | None = None) -> int | None:
    """Return how many threads have processors of their own, where others keep so many `busy`.

    None where `threads` have: those are all cores where it is None.
    """
    count = len(_allowed()) if cpu_count is None else cpu_count
    started = core_count() if threads is None else threads
    fewer = max(1, round(count - busy))
    return fewer if started + busy > count + _BUSY and fewer < started else None


class OtherWork:
    """Measures how many of this process's processors work for others, from when this is made."""

    def __init__(self, stat: Path = _STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat, self._clock = stat, clock
        self._names = {f"cpu{number}" for number in _allowed()}
        self._began, self._busy, self._own = clock(), self._busy_seconds(), time.process_time()

    def processor_count(self, child_seconds: float) -> float | None:
        """Return how many were busy on average, without this process and its child.

        For that one they have worked `child_seconds`. None where the system does not tell, or after
        so short a time that its ticks are too coarse.
        """
        seconds, busy = self._clock() - self._began, self._busy_seconds()
        if busy is None or self._busy is None or seconds < _LEAST_SECONDS:
            return None
        own = time.process_time() - self._own + child_seconds
        return max(0.0, (busy - self._busy - own) / seconds)

    def _busy_seconds(self) -> float | None:
        """Return for how long the processors worked; None where the system does not tell."""
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.strip()]
            ticks = [_busy_ticks(fields) for name, *fields in lines if name in self._names]
        except (OSError, ValueError):
            return None
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _busy_ticks(fields: Sequence[str]) -> int:
    return sum(int(field) for number, field in enumerate(fields) if number not in _IDLE)
