"""The speed at which all CPUs together read memory, and multiply matrices."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from moepack.host.memory_limits import available_memory
from moepack.host.processors import cpu_count
from moepack.planning.machine.model import BYTE_UNITS, Figure, measured

_CPUS = Path("/sys/devices/system/cpu")
_LEAST_LENGTH = 256 << 20
_CACHES = 8
"""The buffer's length in lengths of all last-level caches: a walk over it hardly hits them."""
_TRIALS = 3
_LEAST_ROUNDS = 5
_PIECES = 4
"""Pieces of the buffer for each thread, so that faster CPUs take more."""
_SPARE_LENGTH = 32 << 20
"""Memory for a thread: its stack and its first objects."""
_MATRIX_SIZE = 1024
"""Rows of a square matrix: 4 MiB, and some 10 ms on two processors."""

Clock = Callable[[], float]
"""A clock in seconds, counted from anywhere."""


def measure_bandwidth(
    seconds: float, *, progress: Callable[[], None] = lambda: None, clock: Clock = time.perf_counter
) -> Figure | None:
    """Return the bytes a second that all CPUs together read of memory; None if it is too little.

    The buffer takes up to a quarter of the memory that is available. Rounds over it are done with
    1, 2, 4 and so on threads, then with the fastest number until the `seconds` end. The figure is
    the median of these: it lasts, while the best round is luck. `progress` is called after each
    round.
    """
    length = buffer_length(_last_cache_length(), available_memory())
    if length is None:
        return None
    end = clock() + seconds
    # Python waits forever for a thread that has no memory to begin with: this is left to them.
    spare = np.empty(_SPARE_LENGTH * cpu_count(), np.uint8)
    buffer = np.empty(length, np.uint8)
    del spare
    # All CPUs touch it, so that it lies beside all of them if each has memory of its own.
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda piece: piece.fill(1), np.array_split(buffer, _PIECES * cpu_count())))

    def speeds(threads: int, least: int, end: float) -> list[float]:
        pieces = np.array_split(buffer, _PIECES * threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.max, pieces))  # which starts the threads
            # Of all reductions that numpy does without the interpreter's lock, the fastest.
            read = partial(pool.map, np.max, pieces)
            return _speeds(lambda: list(read()), length, least, end, progress, clock)

    most = cpu_count()
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    trials = {threads: speeds(threads, _TRIALS, 0) for threads in counts}
    fastest = max(trials, key=lambda threads: measured(trials[threads]).value)
    return measured(speeds(fastest, _LEAST_ROUNDS, end), BYTE_UNITS)


def _speeds(
    work: Callable[[], object],
    amount: int,
    least: int,
    end: float,
    progress: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Do some work `least` times, and until the clock says `end`; return its amounts a second."""
    speeds: list[float] = []
    while len(speeds) < least or clock() < end:
        start = clock()
        work()
        speeds.append(amount / (clock() - start))
        progress()
    return speeds


def buffer_length(cache_length: int, available: int) -> int | None:
    """Return the buffer's length in bytes; None if memory is hardly larger than the caches."""
    length = min(max(_CACHES * cache_length, _LEAST_LENGTH), available // 4)
    return length if length >= max(2 * cache_length, _LEAST_LENGTH // 4) else None


def _last_cache_length() -> int:
    """Return the bytes of all caches of the last level; 0 if the system does not say.

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


def measure_compute(seconds: float, progress: Callable[[], None]) -> Figure:
    """Return the floating-point operations a second of matrix products in single precision.

    It is the median of rounds of up to `seconds` in all; `progress` is called after each.
    """
    matrix = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
    product = matrix @ matrix  # which starts the threads
    multiply = partial(np.matmul, matrix, matrix, out=product)
    end = time.perf_counter() + seconds
    return measured(_speeds(multiply, 2 * _MATRIX_SIZE**3, _LEAST_ROUNDS, end, progress))
