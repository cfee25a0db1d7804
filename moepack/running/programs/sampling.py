"""Sampling of tokens, in the words of llama.cpp's server."""

import secrets
from typing import NamedTuple

from moepack.running.programs.bounds import MAX_SEED, MAX_TEMPERATURE, check_bounds


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
