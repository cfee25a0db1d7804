"""How fast all CPUs together multiply matrices, which prompts need most of, beside reading."""

import time
from collections.abc import Callable

import numpy as np

from moepack.machine.bandwidth import Clock
from moepack.machine.model import Figure, measured

_SIZE = 1024
"""Of a square matrix: 4 MiB, and some 10 ms on two processors."""
_LEAST_ROUNDS = 5


def measure_compute(
    seconds: float,
    *,
    progress: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Figure:
    """Return the floating-point operations a second of products of matrices in single precision.

    It is the median of rounds of up to `seconds` in all; `progress` is called after each.
    """
    matrix = np.ones((_SIZE, _SIZE), np.float32)
    product = matrix @ matrix  # which starts the threads
    end = clock() + seconds
    speeds: list[float] = []
    while len(speeds) < _LEAST_ROUNDS or clock() < end:
        start = clock()
        np.matmul(matrix, matrix, out=product)
        speeds.append(2 * _SIZE**3 / (clock() - start))
        progress()
    return measured(speeds)
