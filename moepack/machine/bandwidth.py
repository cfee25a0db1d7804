"""How fast all CPUs together read memory: a walk over a buffer that no cache holds."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from moepack.machine.memory_limits import available_memory
from moepack.machine.model import BYTE_UNITS, Figure, measured

_CPUS = Path("/sys/devices/system/cpu")
_LEAST_LENGTH = 256 << 20
_CACHES = 8
"""Times as long as all last caches the buffer is: a walk over it finds next to nothing in them."""
_TRIALS = 3
_LEAST_ROUNDS = 5
_PIECES = 4
"""For each thread: where some CPUs are slower, the others take more of them."""

Clock = Callable[[], float]
"""Gives the time in seconds, counted from anywhere."""
_SPARE_LENGTH = 32 << 20
"""For a thread: its stack and its first objects."""


def measure_bandwidth(
    seconds: float,
    *,
    progress: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Figure | None:
    """Return the bytes a second that all CPUs together read of memory; None where it is too little.

    The buffer takes up to a quarter of the memory that is available. Rounds over it are done with
    1, 2, 4 and so on threads, then with the number that is fastest until the `seconds` end. The
    figure is the median of these: what lasts, while the best round is luck. `progress` is called
    after each round.
    """
    length = buffer_length(_last_cache_length(), available_memory())
    if length is None:
        return None
    end = clock() + seconds
    walk = _Walk(length, clock, progress)
    trials = {threads: walk.rounds(threads, _TRIALS) for threads in thread_counts(cpu_count())}
    fastest = max(trials, key=lambda threads: measured(trials[threads]).value)
    return measured(walk.rounds(fastest, _LEAST_ROUNDS, end), BYTE_UNITS)


class _Walk:
    """Reads a buffer again and again.

    All CPUs touch it first, so that it lies beside all of them where each has memory of its own.
    """

    def __init__(self, length: int, clock: Clock, progress: Callable[[], None]) -> None:
        self._clock = clock
        self._progress = progress
        # Python waits forever for a thread that has no memory to begin with: that is left to them.
        spare = np.empty(_SPARE_LENGTH * cpu_count(), np.uint8)
        self._buffer = np.empty(length, np.uint8)
        del spare
        with ThreadPoolExecutor(cpu_count()) as pool:
            list(pool.map(lambda piece: piece.fill(1), self._pieces(cpu_count())))

    def rounds(self, threads: int, least: int, end: float = 0) -> list[float]:
        """Read all of it `least` times, and until the clock says `end`; return bytes a second."""
        pieces = self._pieces(threads)
        speeds: list[float] = []
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.max, pieces))  # which starts the threads
            while len(speeds) < least or self._clock() < end:
                start = self._clock()
                # Of all reductions that numpy does without the interpreter's lock, the fastest.
                list(pool.map(np.max, pieces))
                speeds.append(len(self._buffer) / (self._clock() - start))
                self._progress()
        return speeds

    def _pieces(self, threads: int) -> list[np.ndarray]:
        return np.array_split(self._buffer, _PIECES * threads)


def buffer_length(cache_length: int, available: int) -> int | None:
    """Return how long the buffer is; None where the memory would hardly be more than the caches."""
    length = min(max(_CACHES * cache_length, _LEAST_LENGTH), available // 4)
    return length if length >= max(2 * cache_length, _LEAST_LENGTH // 4) else None


def thread_counts(cpu_count: int) -> list[int]:
    """List the powers of two below the number of CPUs, and that number."""
    return [*(1 << n for n in range((cpu_count - 1).bit_length())), cpu_count]


def cpu_count() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _last_cache_length() -> int:
    """Return the bytes of all caches of the last level; 0 where the system does not say.

    By sysfs-devices-system-cpu of the kernel's ABI documents.
    """
    levels: dict[int, dict[str, int]] = {}
    for cache in _CPUS.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, cpus = (
                (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            levels.setdefault(int(level), {})[cpus] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(levels[max(levels)].values()) if levels else 0
