"""Which token comes next."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moepack.errors import RequestError
from moepack.llama_cpp.structs import SamplerParams

_MAX_SEED = (1 << 32) - 2
"""The next one asks llama.cpp for a seed by chance."""
_MAX_TEMPERATURE = 100


@contextmanager
def sampler(library: Any, temperature: float, seed: int) -> Iterator[int]:
    """Make a sampler with llama.cpp's defaults; at a temperature of 0, of the likeliest token.

    Raises RequestError for a number out of bounds.
    """
    for what, number, most in (
        ("temperature", temperature, _MAX_TEMPERATURE),
        ("seed", seed, _MAX_SEED),
    ):
        if not 0 <= number <= most:
            expected = f"0 to {most}"
            raise RequestError(f"{what} out of bounds", expected=expected, found=number)
    chain = library.llama_sampler_chain_init(SamplerParams(True))
    try:
        for link in _links(library, temperature, seed):
            library.llama_sampler_chain_add(chain, link)
        yield chain
    finally:
        library.llama_sampler_free(chain)


def _links(library: Any, temperature: float, seed: int) -> Iterator[int]:
    if not temperature:
        yield library.llama_sampler_init_greedy()
        return
    # No min_p, which is newer: the same options record the same tokens as ever.
    yield library.llama_sampler_init_top_k(40)
    yield library.llama_sampler_init_top_p(0.95, 1)
    yield library.llama_sampler_init_temp(temperature)
    yield library.llama_sampler_init_dist(seed)
