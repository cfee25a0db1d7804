"""Sampling of tokens, in the words of llama.cpp's server, and the limits of its numbers.

Beyond these it aborts the process or takes all memory.
"""

import secrets
from typing import NamedTuple

from moepack.common.errors import RequestError

MAX_THREADS = 512
"""ggml aborts when asked for more."""
MAX_CONTEXT = 1 << 24
MAX_TEMPERATURE = 100
MAX_SEED = (1 << 32) - 2
"""The next one stands for a random seed."""


def random_seed() -> int:
    """Return a random seed."""
    return secrets.randbelow(MAX_SEED + 1)


class Sampling(NamedTuple):
    """Parameters of sampling, with the names and the defaults of llama.cpp.

    A temperature of 0 always samples the likeliest token. `top_k` of 0, `top_p` of 1, `min_p` of 0
    and `repeat_penalty` of 1 have no effect. The same options give the same tokens.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a number out of bounds."""
        check_bounds("temperature", self.temperature, 0, MAX_TEMPERATURE)
        check_bounds("top-k", self.top_k, 0, 1 << 30)
        check_bounds("top-p", self.top_p, 0, 1)
        check_bounds("min-p", self.min_p, 0, 1)
        check_bounds("repeat penalty", self.repeat_penalty, 0.1, 100)
        check_bounds("seed", self.seed, 0, MAX_SEED)


def check_bounds(name: str, number: float, least: float, most: float) -> None:
    """Raise RequestError for a number out of bounds, or that is not a number."""
    if not least <= number <= most:
        expected = f"{least:,} to {most:,}"
        raise RequestError(f"{name} out of bounds", expected=expected, found=number)
