"""What llama.cpp is asked for at most: beyond it, it aborts the process or takes all memory."""

from moepack.errors import RequestError

MAX_THREADS = 512
"""ggml aborts when asked for more."""
MAX_CONTEXT = 1 << 24


def check_threads(count: int) -> None:
    """Raise RequestError for a number of threads out of bounds."""
    _check("threads", count, MAX_THREADS)


def check_context(length: int) -> None:
    """Raise RequestError for a context, in tokens, out of bounds."""
    _check("context length", length, MAX_CONTEXT)


def _check(what: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise RequestError(f"{what} out of bounds", expected=f"1 to {most:,}", found=number)
