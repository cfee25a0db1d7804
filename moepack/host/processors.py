"""The processors that this process may use, and how busy others keep them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from moepack.host.control_groups import own_groups

_CPUS = Path("/sys/devices/system/cpu")
_STAT = Path("/proc/stat")
_BUSY = 0.5
"""The part of a processor by which threads may exceed the processors."""
_LEAST_SECONDS = 0.15
_IDLE = (3, 4, 8, 9)
"""The fields of /proc/stat that are idle, waiting for drives, or counted in others (proc(5))."""


def cpu_count() -> int:
    """Return how many processors this process may use."""
    return len(_allowed())


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def limited_threads() -> int | None:
    """Return how many threads may compute at once, None if nothing limits this process.

    It is one thread for each core it may use; no more than its control groups allow. llama.cpp
    starts as many as the machine has cores, and waits for each of them all the time.
    """
    quota = cpu_quota()
    if quota is not None:
        return max(1, min(core_count(), int(quota)))
    return None if cpu_count() == os.cpu_count() else core_count()


def cpu_quota() -> float | None:
    """Return how many processors' time the control groups allow, None without a limit."""
    quotas = []
    for folder, is_second in own_groups("cpu"):
        try:
            names = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            most, period = " ".join((folder / name).read_text() for name in names).split()
            if int(most) > 0:
                quotas.append(int(most) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # `max` is no limit
            continue
    return min(quotas, default=None)


def core_count() -> int:
    """Return how many cores this process may use: two processors may be threads of one."""
    siblings = set()
    for cpu in _allowed():
        try:
            siblings.add((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def fewer_threads(threads: int | None, busy: float, processors: int | None = None) -> int | None:
    """Return how many threads have processors of their own, if others keep so many `busy`.

    None if `threads` have; by default those are all cores.
    """
    count = cpu_count() if processors is None else processors
    started = core_count() if threads is None else threads
    fewer = max(1, round(count - busy))
    return fewer if started + busy > count + _BUSY and fewer < started else None


class OtherWork:
    """Measures how many of this process's processors work for others, from its making on."""

    def __init__(self, stat: Path = _STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat, self._clock = stat, clock
        self._names = {f"cpu{number}" for number in _allowed()}
        self._began, self._busy, self._own = clock(), self._busy_seconds(), time.process_time()

    def processor_count(self, child_seconds: float) -> float | None:
        """Return how many were busy on average, without this process and its child.

        Its child's threads worked `child_seconds`. None if the system does not tell, or after so
        short a time that its ticks are too coarse.
        """
        seconds, busy = self._clock() - self._began, self._busy_seconds()
        if busy is None or self._busy is None or seconds < _LEAST_SECONDS:
            return None
        own = time.process_time() - self._own + child_seconds
        return max(0.0, (busy - self._busy - own) / seconds)

    def _busy_seconds(self) -> float | None:
        """Return the time for which the processors worked; None if the system does not tell."""
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.strip()]
            ticks = [
                int(field)
                for name, *fields in lines
                if name in self._names
                for number, field in enumerate(fields)
                if number not in _IDLE
            ]
        except (OSError, ValueError):
            return None
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
