"""Limits of llama.cpp: beyond them it aborts the process or takes all memory."""

from moepack.common.errors import RequestError

MAX_THREADS = 512
"""ggml aborts when asked for more."""
MAX_CONTEXT = 1 << 24
MAX_TEMPERATURE = 100
MAX_SEED = (1 << 32) - 2
"""The next one stands for a random seed."""


def check_bounds(name: str, number: float, least: float, most: float) -> None:
    """Raise RequestError for a number out of bounds, or that is not a number."""
    if not least <= number <= most:
        expected = f"{least:,} to {most:,}"
        raise RequestError(f"{name} out of bounds", expected=expected, found=number)
