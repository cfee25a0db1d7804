"""Which token comes next."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from moepack.errors import RequestError
from moepack.llama_cpp.structs import SamplerParams

MAX_SEED = (1 << 32) - 2
"""The next one asks llama.cpp for a seed by chance."""
MAX_TEMPERATURE = 100
_PENALIZED_COUNT = 64
"""llama.cpp's default: over how many tokens a penalty for repeating looks back."""


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


@contextmanager
def sampler(library: Any, sampling: Sampling) -> Iterator[int]:
    """Make a sampler, in the order of steps that is llama.cpp's own."""
    chain = library.llama_sampler_chain_init(SamplerParams(True))
    try:
        for link in _links(library, sampling):
            library.llama_sampler_chain_add(chain, link)
        yield chain
    finally:
        library.llama_sampler_free(chain)


def _links(library: Any, sampling: Sampling) -> Iterator[int]:
    if sampling.repeat_penalty != 1:
        repeated = float(sampling.repeat_penalty)
        yield library.llama_sampler_init_penalties(_PENALIZED_COUNT, repeated, 0, 0)
    if not sampling.temperature:
        yield library.llama_sampler_init_greedy()
        return
    if sampling.top_k:
        yield library.llama_sampler_init_top_k(sampling.top_k)
    if sampling.top_p < 1:
        yield library.llama_sampler_init_top_p(sampling.top_p, 1)
    if sampling.min_p:
        yield library.llama_sampler_init_min_p(sampling.min_p, 1)
    yield library.llama_sampler_init_temp(sampling.temperature)
    yield library.llama_sampler_init_dist(sampling.seed)
