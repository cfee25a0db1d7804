"""What other processes take of the drive and of the CPUs, while reads are timed.

A drive that others read as well serves one request of each in turn, so that few long requests get
more of it than many short ones. A comparison of layouts then compares their share of a crowd.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST = 0.1
"""The share of the time that may go by in working for others, and in waiting."""

_SECTOR = 512
"""Bytes, in /sys/dev/block/*/stat, whatever the drive's own sectors are."""


class Disturbance(NamedTuple):
    """What others did meanwhile; None where the system does not tell.

    `drive_share` is the share of the time that the drives worked for them: that in which they were
    busy, by the share of the bytes that were not ours. `cpu_wait_share` is how long this thread
    waited for a CPU, as a share of the time.
    """

    drive_share: float | None
    cpu_wait_share: float | None

    @property
    def is_too_much(self) -> bool:
        """Whether what was measured meanwhile says little about the drive."""
        return any(share is not None and share > MOST for share in self)


class _Work(NamedTuple):
    """What a drive did since the machine was started: bytes, and seconds in which it was busy."""

    length: int
    busy: float


class _Counters(NamedTuple):
    """Since the machine and the process were started: work of each drive, bytes, seconds."""

    drives: list[_Work] | None
    ours: int | None
    waited: float | None
    time: float


class Others:
    """Tells what others did since it was last asked, to the drives that `paths` lie on."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._drives = {drive for path in paths if (drive := drive_of(path)) is not None}
        self._last = self._now()

    def __call__(self) -> Disturbance:
        """Return what others did since the last call."""
        before, self._last = self._last, self._now()
        after = self._last
        drive_share = cpu_wait_share = None
        seconds = max(after.time - before.time, 1e-9)
        if after.drives is not None and before.drives is not None:
            pairs = list(zip(before.drives, after.drives, strict=True))
            total = sum(now.length - then.length for then, now in pairs)
            busy = max(now.busy - then.busy for then, now in pairs) / seconds
            ours = (after.ours or 0) - (before.ours or 0)
            theirs = max(0.0, 1 - ours / total) if total > 0 else 0.0
            drive_share = theirs * min(1.0, busy)
        if after.waited is not None and before.waited is not None:
            waited = max(0.0, after.waited - before.waited)
            cpu_wait_share = waited / seconds
        return Disturbance(drive_share, cpu_wait_share)

    def _now(self) -> _Counters:
        ours = _our_bytes()
        drives = None
        if ours is not None and self._drives:
            works = [work for drive in self._drives if (work := _work_of(drive)) is not None]
            drives = works if len(works) == len(self._drives) else None
        return _Counters(drives, ours, _waited(), time.perf_counter())


def drive_of(path: Path) -> Path | None:
    """Return where sysfs tells of the drive that a file lies on; None where it does not."""
    number = path.stat().st_dev
    drive = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        drive = drive.resolve(strict=True)
    except OSError:
        return None
    return drive.parent if (drive / "partition").exists() else drive


def _work_of(drive: Path) -> _Work | None:
    """Return what a drive did (block/stat.rst of the kernel)."""
    try:
        fields = (drive / "stat").read_text().split()
        return _Work((int(fields[2]) + int(fields[6])) * _SECTOR, int(fields[9]) / 1000)
    except (OSError, ValueError, IndexError):
        return None


def _our_bytes() -> int | None:
    """Return the bytes that this process has read from and written to drives (proc_pid_io(5))."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"]) + int(fields["write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def _waited() -> float | None:
    """Return the seconds that this thread has waited for a CPU (scheduler/sched-stats.rst)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
