"""The use of the drive and of the CPUs by other processes while reads are timed.

A drive that others read as well serves one request of each in turn, so that few long requests get
more of it than many short ones. A comparison of layouts then compares their share of a crowd.
"""

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

from moepack.host.control_groups import read_number

MAX_SHARE = 0.1
"""The largest disturbance with which measurements say something about the drive."""

_SECTOR = 512
"""Bytes of a sector in /sys/dev/block/*/stat, for every drive."""


class DisturbanceMonitor:
    """Measures the disturbance of the drives that `paths` lie on."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._drives = {drive for path in paths if (drive := drive_of(path)) is not None}
        self._last = self._count()

    def __call__(self) -> float:
        """Return a share of the time since the last call, 0 if the system does not report any.

        The larger one of two: that in which the drives worked for others (their busy time by the
        share of the bytes that were not ours), and that in which this thread waited for a CPU.
        """
        before, self._last = self._last, self._count()
        seconds, waited, own_length, *drives = (
            None if now is None or then is None else now - then
            for then, now in zip(before, self._last, strict=True)
        )
        seconds = max(seconds or 0.0, 1e-9)
        drive_share = 0.0
        work = [number for number in drives if number is not None]
        if own_length is not None and work and len(work) == len(drives):
            total, busy = sum(work[::2]), max(work[1::2]) / seconds
            others_share = max(0.0, 1 - own_length / total) if total > 0 else 0.0
            drive_share = others_share * min(1.0, busy)
        return max(drive_share, (waited or 0.0) / seconds)

    def _count(self) -> list[float | None]:
        """Return the time, the seconds waited, our bytes; bytes and busy seconds of each drive."""
        work = itertools.chain.from_iterable(map(_work_of, self._drives))
        return [time.perf_counter(), _waited(), _own_length(), *work]


def drive_of(path: Path) -> Path | None:
    """Return the folder in sysfs of the drive that a file lies on, or None."""
    number = path.stat().st_dev
    drive = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        drive = drive.resolve(strict=True)
    except OSError:
        return None
    return drive.parent if (drive / "partition").exists() else drive


def _work_of(drive: Path) -> tuple[int, float] | tuple[None, None]:
    """Return the bytes that a drive moved, and its busy seconds (block/stat.rst of the kernel)."""
    try:
        fields = (drive / "stat").read_text().split()
        return (int(fields[2]) + int(fields[6])) * _SECTOR, int(fields[9]) / 1000
    except (OSError, ValueError, IndexError):
        return None, None


def _own_length() -> int | None:
    """Return the bytes that this process has read from and written to drives."""
    read, written = read_length("self"), read_number(Path("/proc/self/io"), "write_bytes:")
    return None if read is None or written is None else read + written


def read_length(process_id: int | str) -> int | None:
    """Return the bytes that a process has read from drives, mapped files included.

    None if the system does not report it (proc_pid_io(5)).
    """
    return read_number(Path(f"/proc/{process_id}/io"), "read_bytes:")


def _waited() -> float | None:
    """Return the seconds that this thread has waited for a CPU (scheduler/sched-stats.rst)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
