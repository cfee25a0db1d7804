"""How many CPUs other processes leave free.

Where they leave none, whoever waits for more reads waits longer, whatever the drive does: a
comparison of layouts then compares how they share a CPU.
"""

import os
import time
from pathlib import Path

_BUSY = (1, 2, 3, 6, 7, 8)
"""The fields user, nice, system, irq, softirq and steal of /proc/stat (proc_stat(5))."""


class FreeCpus:
    """Tells what was free since it was last asked."""

    def __init__(self) -> None:
        self._last = _now()

    def __call__(self) -> float | None:
        """Return how many CPUs others left free since the last call; None where no one tells."""
        before, self._last = self._last, _now()
        if before is None or self._last is None or self._last[0] <= before[0]:
            return None
        seconds, others = (now - then for now, then in zip(self._last, before, strict=True))
        return (os.cpu_count() or 1) - max(0.0, others / seconds)


def _now() -> tuple[float, float] | None:
    """Return the time, and the CPU time of all other processes, in seconds."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=11)
        busy = sum(int(fields[number]) for number in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.perf_counter(), busy - time.process_time()
