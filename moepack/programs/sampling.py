"""Which token comes next, in the words of llama.cpp's server."""

import secrets
from collections.abc import Mapping
from typing import NamedTuple

from moepack.errors import RequestError

MAX_SEED = (1 << 32) - 2
"""The next one asks llama.cpp for a seed by chance."""
MAX_TEMPERATURE = 100


def random_seed() -> int:
    """Return a seed by chance."""
    return secrets.randbelow(MAX_SEED + 1)


class Sampling(NamedTuple):
    """How tokens are chosen, with the names and the defaults of llama.cpp.

    At a temperature of 0 it is always the likeliest one. `top_k` of 0, `top_p` of 1, `min_p` of 0
    and `repeat_penalty` of 1 do nothing. The same options give the same tokens again.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a number out of bounds."""
        for what, number, least, most in (
            ("temperature", self.temperature, 0, MAX_TEMPERATURE),
            ("top-k", self.top_k, 0, 1 << 30),
            ("top-p", self.top_p, 0, 1),
            ("min-p", self.min_p, 0, 1),
            ("repeat penalty", self.repeat_penalty, 0.1, 100),
            ("seed", self.seed, 0, MAX_SEED),
        ):
            if not least <= number <= most:
                expected = f"{least} to {most}"
                raise RequestError(f"{what} out of bounds", expected=expected, found=number)

    def fields(self) -> Mapping[str, float]:
        """Return the fields of a request that say the same."""
        return self._asdict()
